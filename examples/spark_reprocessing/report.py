"""Sums the orders of each customer, with Spark: python report.py

The offsets are fixed when the table is loaded; nothing is locked, and no consumer notices.
"""

import os

from keylane.spark import local_session

META = os.environ.get("KEYLANE_META", "127.0.0.1:7000")

# Spark's Python workers may import this module; the main guard keeps them from starting Spark.
if __name__ == "__main__":
    spark = local_session()
    reader = spark.read.format("keylane").options(meta=META, subject="orders")
    orders = reader.option("jsonSchema", "cents BIGINT").load()
    orders.createOrReplaceTempView("orders")
    spark.sql("""
        SELECT CAST(key AS STRING) AS customer, count(*) AS orders, sum(value.cents) AS cents
        FROM orders GROUP BY key ORDER BY customer
    """).show()
    spark.stop()
