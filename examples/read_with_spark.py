"""Read all messages of a subject as a Spark table, without locks or acks; the offsets are fixed
when the table is loaded.

keylane dev --subject visits          (in another terminal)
printf 'a=1\\na=2\\nb=3\\n' | keylane produce visits --key-separator =
python examples/read_with_spark.py
"""

import os

from keylane.spark import local_session

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")

# Spark's Python workers may import this module; the main guard keeps them from starting Spark.
if __name__ == "__main__":
    spark = local_session()
    visits = spark.read.format("keylane").options(meta=META, subject="visits").load()
    visits.createOrReplaceTempView("visits")
    spark.sql("""
        SELECT CAST(key AS STRING) AS page, sum(CAST(CAST(value AS STRING) AS INT)) AS visitors
        FROM visits GROUP BY key ORDER BY page
    """).show()
    spark.stop()
