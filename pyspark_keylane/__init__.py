"""Where Spark finds the format `keylane` by itself: it imports every top-level package whose name
begins with `pyspark_`.

An import that fails here would end the search for the sources of all other packages too, so nothing
but PySpark is needed: what else is missing is told when the format is used.
"""

from keylane.spark.registration import source_class

DefaultSource = source_class()
