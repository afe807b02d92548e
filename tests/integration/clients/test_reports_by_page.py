"""What brokers say of many partitions is read by the page, and is the same as one by one."""

import pytest
from msgspec.structs import replace

from keylane import Admin, Producer
from keylane.admin import GroupDescription, PartitionProgress
from keylane.admin import client as admin_client
from support.descriptions import without_rates

PARTITIONS = 40


@pytest.fixture
async def admin(shared_cluster):
    await shared_cluster.create("many", partitions=PARTITIONS)
    async with Admin(shared_cluster.meta) as admin:
        await admin.create_group("many", "readers")
        async with Producer(shared_cluster.meta) as producer:
            for number in range(100):
                await producer.send("many", b"x", key=f"k{number}")
        yield admin
        await admin.delete_subject("many", force=True)


def without_ages(group: GroupDescription) -> list[PartitionProgress]:
    """The partitions of a group without their ages, which grow between two questions."""
    return [replace(each, age_ms=None) for each in group.partitions]


async def test_pages_say_what_each_partition_says(admin, monkeypatch):
    by_page = await admin.describe_group("many", "readers")
    subject_by_page = await admin.describe_subject("many", holds=False)
    hosted = await admin.list_hosted(within_s=5)
    monkeypatch.setattr(admin_client, "PAGED_MIN", 10_000)
    one_by_one = await admin.describe_group("many", "readers")
    assert without_ages(one_by_one) == without_ages(by_page)
    described = await admin.describe_subject("many")
    assert without_rates(described) == without_rates(subject_by_page)
    assert by_page.lag == 100
    reports = [each for found in hosted.values() for each in found if each.subject == "many"]
    assert len(reports) == PARTITIONS
    assert sum(each.next_offset for each in reports) == 100
    assert sum(group.lag for each in reports for group in each.groups) == 100
    assert set(hosted) == {"g1", "g2"}
