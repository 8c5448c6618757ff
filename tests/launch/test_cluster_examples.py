"""The examples of examples/cluster: manifests beside the projects' own schemas, scripts, and what they type."""

import json
import os
import shlex
import subprocess

import pytest
import typer
import yaml
from kubeflow_trainer_api import models

import cli
from loop.launch import schedulers
from loop.launch.environment import tf_cluster
from loop.launch.host_slots import read_hosts
from tests.conftest import ROOT

CLUSTER = ROOT / "examples" / "cluster"
SCHEMAS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""Kubeflow publishes its own schemas as these models, and with them those of JobSet and Kubernetes that they use."""


def manifests(name):
    return {each["kind"]: each for each in yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text())}


def fits(manifest):
    """Whether the models take it, and lose nothing of it: they leave out what they don't know."""
    try:
        return getattr(models, SCHEMAS[manifest["kind"]]).from_dict(manifest).to_dict() == manifest
    except ValueError:
        return False


def job_of(manifest):
    """The specification of the job of a manifest, and the template of its pods."""
    spec = manifest["spec"]
    if manifest["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    if "replicatedJobs" in spec:
        [replicated] = spec["replicatedJobs"]
        spec = replicated["template"]["spec"]
    return spec, spec["template"]["spec"]


MAIN = {"indexed-job": "Job", "jobset": "JobSet", "trainjob": "ClusterTrainingRuntime"}
"""In which manifest of each file the pods are."""


@pytest.mark.parametrize("name", MAIN)
def test_manifests_fit_the_schemas_of_their_projects(name):
    found = manifests(name)
    assert all(map(fits, found.values()))
    main = found[MAIN[name]]
    job, pod = job_of(main)
    [container] = pod["containers"]
    for owner, key, wrong in (
        (job, "completion", 4),
        (job, "backoffLimit", "none"),
        (job["podFailurePolicy"]["rules"][0], "action", 2),
        (pod, "restartPolicies", "Never"),
        (container, "image", ["tfloop"]),
    ):
        kept = dict(owner)
        owner[key] = wrong
        assert not fits(main), (key, wrong)
        owner.clear()
        owner.update(kept)
    assert fits(main)


@pytest.mark.parametrize("name", MAIN)
def test_pods_find_their_places_by_what_the_manifest_gives_them(name):
    """With what Kubernetes, JobSet and Trainer add: a pod's index and name, and the number of pods."""
    found = manifests(name)
    job, pod = job_of(found[MAIN[name]])
    [container] = pod["containers"]
    environment = {each["name"]: each.get("value", "digits") for each in container["env"]}
    if name == "trainjob":
        field = container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
        pods = found["TrainJob"]["spec"]["trainer"]["numNodes"]
        environment |= {"JAX_NUM_PROCESSES": str(pods), "JAX_PROCESS_ID": "2"}
        assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["ClusterTrainingRuntime"]["metadata"]["name"]
    else:
        pods = job["completions"]
        assert (job["completionMode"], job["parallelism"]) == ("Indexed", pods)
    stem = "digits" if name == "indexed-job" else "digits-node-0"
    environment |= {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": f"{stem}-2"}
    rank, addresses = tf_cluster(schedulers.place("auto", environment)["TF_CONFIG"])
    hosts = [address.partition(":")[0] for address in addresses.values()]
    assert (rank, hosts) == (2, [f"{stem}-{index}.digits" for index in range(pods)])
    if name == "indexed-job":
        service = found["Service"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert service["spec"]["selector"] == {"job-name": found["Job"]["metadata"]["name"]}
        assert pod["subdomain"] == service["metadata"]["name"]


def test_manifests_run_the_same_command_and_restart_by_the_same_rules():
    commands, rules, pods = [], [], []
    for name, kind in MAIN.items():
        found = manifests(name)
        job, pod = job_of(found[kind])
        trainer = found["TrainJob"]["spec"]["trainer"] if "TrainJob" in found else pod["containers"][0]
        commands.append([pod["containers"][0]["image"], *trainer["command"]])
        rules.append(
            {
                tuple(rule.get("onExitCodes", {}).get("values", ["lost"])): rule
                for rule in job["podFailurePolicy"]["rules"]
            }
        )
        pods.append((pod["restartPolicy"], pod["terminationGracePeriodSeconds"], pod["volumes"]))
    assert commands == [commands[0]] * len(MAIN)
    check_command(commands[0][1:])
    assert rules == [rules[0]] * len(MAIN)
    assert pods == [pods[0]] * len(MAIN)
    actions = {codes: rule["action"] for codes, rule in rules[0].items()}
    assert actions == {(2,): "FailJob", (75,): "Ignore", ("lost",): "Ignore"}
    assert pods[0][0] == "Never"  # Kubernetes takes a podFailurePolicy with no other


def check_command(words):
    """That `tfloop train` has all these options."""
    assert words[:2] == ["tfloop", "train"]
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {name for each in typer.main.get_group(cli.app).commands["train"].params for name in each.opts}
    assert options <= known


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_batch_script_is_queued_again_if_it_was_stopped(code, tmp_path):
    """`srun` and `scontrol` here print what they are called with; tests/campaigns/slurm.py has Slurm itself."""
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@"; exit {code}\n')
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho scontrol "$@"\n')
    for program in ("srun", "scontrol"):
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "4"}
    command = ["bash", ROOT / "examples" / "cluster" / "slurm.sbatch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (code, "")
    typed, *more = done.stdout.splitlines()
    check_command(shlex.split(typed[typed.index("tfloop train") :]))
    assert more == (["scontrol requeue 17"] if code == 75 else [])


@pytest.mark.parametrize("script", ["two-hosts.sh", "tf-config.sh"])
def test_scripts_for_two_hosts_type_what_tfloop_knows(script, tmp_path):
    """`tfloop` here prints what it is called with: that the commands themselves work is tested above, and elsewhere."""
    path = ROOT / "examples" / "cluster" / script
    (tmp_path / "tfloop").write_text('#!/bin/sh\necho "$TF_CONFIG"; for word in tfloop "$@"; do echo "$word"; done\n')
    (tmp_path / "tfloop").chmod(0o755)
    more = {"env": os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}
    hosts = ["h1", "h2"] if script == "two-hosts.sh" else ["1", "h1:2222", "h2:2222"]
    printed = subprocess.check_output([path, *hosts, "--epochs", "3"], text=True, timeout=240, **more)
    variable, *words = printed.splitlines()
    check_command(words)
    assert words[-2:] == ["--epochs", "3"]
    if script == "two-hosts.sh":
        assert read_hosts(words[words.index("--hosts") + 1], None, "auto", None, None) == {"h1": 1, "h2": 1}
    else:
        task = {"type": "worker", "index": 1}
        assert json.loads(variable) == {"cluster": {"worker": ["h1:2222", "h2:2222"]}, "task": task}
    lacking = subprocess.run([path, hosts[0]], capture_output=True, text=True, timeout=240, **more)
    assert lacking.returncode
    assert "give " in lacking.stderr
