"""Lets Spark discover the format `keylane`: Spark imports every top-level package whose name begins
with `pyspark_`.

A failed import here would also end the search for all other packages' sources. So this needs only
PySpark; a missing package is reported when the format is used.
"""

from keylane.spark.registration import source_class

DefaultSource = source_class()
