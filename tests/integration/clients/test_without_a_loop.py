"""The program of docs/CONSUMING.md that needs an Admin and a Reader beside `keylane.sync`, in the
main thread and in another one.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keylane.sync import Consumer, Producer
from support.cluster import Cluster

GUIDE = Path(__file__).parents[3] / "docs" / "CONSUMING.md"


def test_program_of_the_guide_runs_in_any_thread(shared_cluster: Cluster, capsys):
    section = GUIDE.read_text().partition("### Without an event loop\n")[2]
    (program,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
        if "Admin" in block
    )
    program = program.replace("127.0.0.1:7000", shared_cluster.meta)
    program = program.replace('"orders"', '"without-a-loop"')
    asyncio.run(shared_cluster.create("without-a-loop", partitions=1))
    with Producer(shared_cluster.meta) as producer:
        for value in (b"1", b"2"):
            producer.send("without-a-loop", value, key=b"k").result()
    with Consumer(shared_cluster.meta, subject="without-a-loop", group="billing") as consumer:
        next(consumer).ack()
    exec(program, {})
    with ThreadPoolExecutor(1) as pool:
        pool.submit(exec, program, {}).result(60)
    assert capsys.readouterr().out == "1 [b'1', b'2']\n" * 2
