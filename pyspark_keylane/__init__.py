"""Lets Spark discover the format `keylane`. Spark imports every top-level package whose name begins
with `pyspark_`.

An import that fails here would also stop Spark from finding the sources of all other packages. So
this module only needs PySpark, and a missing package is reported when the format is used.
"""

from keylane.spark.registration import source_class

DefaultSource = source_class()
