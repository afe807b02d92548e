"""All messages of a subject as a Spark table: no lock, no ack, and the offsets are fixed when it is
loaded.

keylane dev --subject visits          (in another terminal)
printf 'a=1\\na=2\\nb=3\\n' | keylane produce visits --key-separator =
python examples/read_with_spark.py
"""

import os

from keylane.spark import local_session

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")

# Spark starts Python workers that import what they need: a main guard keeps them from starting
# Spark themselves.
if __name__ == "__main__":
    spark = local_session()
    visits = spark.read.format("keylane").options(meta=META, subject="visits").load()
    visits.createOrReplaceTempView("visits")
    spark.sql("""
        SELECT CAST(key AS STRING) AS page, sum(CAST(CAST(value AS STRING) AS INT)) AS visitors
        FROM visits GROUP BY key ORDER BY page
    """).show()
    spark.stop()
