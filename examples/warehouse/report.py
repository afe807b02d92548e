"""Counts orders by state, with DuckDB over the Parquet files: python report.py FOLDER"""

import sys

import duckdb

REPORT = """
    SELECT state, count(*)::INT AS orders, sum(cents)::BIGINT AS cents
    FROM (
        SELECT "order", arg_max(state, version) AS state, arg_max(cents, version) AS cents
        FROM read_parquet($files) GROUP BY "order"
    )
    GROUP BY state ORDER BY state
"""


def count_orders(folder: str) -> list[tuple[str, int, int]]:
    return duckdb.execute(REPORT, {"files": f"{folder}/*.parquet"}).fetchall()


if __name__ == "__main__":
    for state, orders, cents in count_orders(sys.argv[1]):
        print(f"{state:10} {orders:6} {cents / 100:12.2f}")
