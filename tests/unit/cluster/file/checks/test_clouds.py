"""What goes wrong with one cloud alone, and with files on this machine."""

from __future__ import annotations

from raytrain.cluster.file.checks.clouds import RUN_INSTANCES
from tests.unit.cluster.file.support import edited, found, line_of, rendered

AWS = rendered("aws")
KEY = rendered("aws", ssh_key="~/.ssh/id_ed25519")


def test_names_that_ec2_does_not_know() -> None:
    text = AWS.replace("      BlockDeviceMappings:", "      BlockDeviceMapping:", 1)
    (mistake,) = found(text)
    assert mistake.where == "available_node_types.head.node_config.BlockDeviceMapping"
    assert mistake.fix == "did you mean BlockDeviceMappings?"
    assert mistake.line == line_of(text, "BlockDeviceMapping:")
    assert found(edited(AWS, "InstanceType: m5.xlarge", "InstanceType: m5.xlarge\n      SubnetIds: [a]")) == []


def test_what_ray_itself_writes_is_known_to_ec2() -> None:
    assert {
        "MinCount",
        "MaxCount",
        "TagSpecifications",
        "SubnetId",
        "SecurityGroupIds",
        "IamInstanceProfile",
    } <= RUN_INSTANCES
    assert len(RUN_INSTANCES) == 43


def test_the_image_is_named() -> None:
    image = next(line for line in AWS.splitlines() if "ImageId:" in line)
    text = AWS.replace(f"{image}\n", "", 1)
    assert [(each.where, each.value) for each in found(text)] == [
        ("available_node_types.head.node_config.ImageId", "not given")
    ]


def test_a_key_of_ones_own_has_a_name_at_ec2() -> None:
    assert found(KEY) == []
    wheres = [each.where for each in found(edited(KEY, "      KeyName: id_ed25519\n", "", count=3))]
    assert wheres == [f"available_node_types.{name}.node_config.KeyName" for name in ("head", "spot", "on-demand")]


def test_keys_that_are_not_here() -> None:
    (mistake,) = found(KEY, exists=lambda path: not path.startswith("~/.ssh"))
    assert (mistake.where, mistake.value) == ("auth.ssh_private_key", "~/.ssh/id_ed25519")
    azure = rendered("azure", ssh_key="~/.ssh/id_ed25519")
    assert [each.where for each in found(azure, exists=lambda path: not path.endswith(".pub"))] == ["auth.ssh_public_key"]


def test_azure_wants_both_keys_or_none() -> None:
    azure = rendered("azure", ssh_key="~/.ssh/id_ed25519")
    text = edited(azure, ", ssh_public_key: ~/.ssh/id_ed25519.pub", "")
    assert [each.where for each in found(text)] == ["auth.ssh_public_key"]


def test_google_cloud_wants_a_project() -> None:
    text = edited(rendered("gcp"), ", project_id: my-project", "")
    assert [each.where for each in found(text)] == ["provider.project_id"]


def test_what_is_to_be_copied_is_here() -> None:
    text = edited(AWS, "  ~/raytrain-src/LICENSE: LICENSE\n", "  ~/raytrain-src/LICENSE: LICENCE\n")
    (mistake,) = found(text)
    assert (mistake.where, mistake.line) == ("file_mounts.~/raytrain-src/LICENSE", line_of(text, "LICENCE"))
