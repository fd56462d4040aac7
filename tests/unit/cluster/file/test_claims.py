"""What the comments of our files say of Ray 2.60 is true: the next Ray may be different, and then they have to change."""

from __future__ import annotations

from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount
from ray.core.generated.instance_manager_pb2 import Instance, InstanceUpdateEvent

HEAD = NodeTypeConfig(name="head", min_worker_nodes=0, max_worker_nodes=1, resources={"CPU": 0, "GPU": 0})


def node(name: str, priority: int, most: int) -> NodeTypeConfig:
    return NodeTypeConfig(
        name=name, min_worker_nodes=0, max_worker_nodes=most, priority=priority, resources={"CPU": 4, "GPU": 1}
    )


def launched(number: int, types: list[NodeTypeConfig], available: dict[str, float] | None = None) -> dict[str, int]:
    """What the autoscaler would start for so many workers."""
    wanted = ResourceRequestByCount(request=ResourceRequestUtil.make({"CPU": 1, "GPU": 1}), count=number)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs={each.name: each for each in [HEAD, *types]},
        max_num_nodes=11,
        resource_requests=[wanted],
        recoverable_resource_availabilities=available or {},
    )
    return {each.instance_type: each.count for each in ResourceDemandScheduler().schedule(request).to_launch}


def failed(status: int) -> dict[str, float]:
    monitor = CloudResourceMonitor()
    monitor.notify([InstanceUpdateEvent(instance_id="i", new_instance_status=status, instance_type="spot")])
    return dict(monitor.get_recoverable_resource_availabilities())


SPOT, DEMAND = node("spot", 10, 8), node("on-demand", 0, 2)


def test_the_higher_priority_comes_first_up_to_its_max_workers() -> None:
    for types in ([SPOT, DEMAND], [DEMAND, SPOT]):
        assert launched(2, types) == {"spot": 2}
        assert launched(10, types) == {"spot": 8, "on-demand": 2}


def test_a_type_that_the_cloud_refused_is_asked_for_again() -> None:
    assert failed(Instance.ALLOCATION_FAILED) == {}


def test_only_a_machine_that_never_came_up_lets_another_type_go_first() -> None:
    assert launched(2, [SPOT, DEMAND], failed(Instance.ALLOCATION_TIMEOUT)) == {"on-demand": 2}
