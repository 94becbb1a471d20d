# SPDX-License-Identifier: Apache-2.0
"""The docs hold together without mkdocs: links, anchors, commands, imports, and tables that are made from the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.harness import ROOT, run_program

PACKAGE = ROOT / "deepspeed_distca"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [p for name in ("README", "CONTRIBUTING", "CHANGELOG") if (p := ROOT / f"{name}.md").exists()] + PAGES
TEXTS = {path: path.read_text(encoding="utf-8") for path in ALL}

#: How commands of the docs begin, the test that runs the like, and what it has of it.
RUN = {
    "bash scripts/test.sh": (".ci/run", "bash scripts/test.sh"),
    "DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 train.py": ("tests/test_readme.py", "DS_ACCELERATOR=cpu"),
    "deepspeed --num_accelerators 2 examples/hf_llama/train_trainer.py": (
        "tests/test_launchers.py",
        "train_trainer.py",
    ),
    "deepspeed --num_accelerators 2 examples/hf_llama/train_grpo.py": ("tests/test_example_grpo.py", "train_grpo.py"),
    "deepspeed --num_accelerators 2 examples/hf_llama/shared_prompts.py": (
        "tests/test_example_shared_prompts.py",
        "shared_prompts.py",
    ),
    "deepspeed --num_accelerators 2 examples/hf_llama/train_trl.py": ("tests/test_launchers.py", "train_trl.py"),
    "accelerate launch --config_file configs/accelerate/deepspeed.yaml examples/hf_llama/train_accelerate.py": (
        "tests/test_launchers.py",
        "train_accelerate.py",
    ),
    "deepspeed --module deepspeed_distca.run train.py": ("tests/test_launchers.py", 'deepspeed("--module", module'),
    "torchrun --nproc_per_node 2 -m deepspeed_distca.run train.py": (
        "tests/test_launchers.py",
        'torchrun("-m", module',
    ),
    "accelerate launch --config_file configs/accelerate/deepspeed.yaml -m deepspeed_distca.run train.py": (
        "tests/test_launchers.py",
        '"-m", module, *script)',
    ),
    "torchrun --nnodes 2": ("benchmarks/slow_network.py", '"--nnodes", "2", "--node-rank"'),
    "ds_distca advise": ("tests/commands/test_advise.py", '["advise"'),
    "ds_distca simulate": ("tests/commands/test_simulate.py", '["simulate"'),
    "ds_distca doctor": ("tests/commands/test_doctor.py", '["doctor"'),
    "ds_distca plan": ("tests/commands/test_plan.py", '"plan"'),
    "ds_distca profile": ("tests/commands/test_profile.py", 'main(["profile"'),
    "torchrun --nproc_per_node 2 -m deepspeed_distca.cli profile": (
        "tests/commands/test_profile.py",
        '"deepspeed_distca.cli"',
    ),
}
#: Commands that no test runs, and why.
NOT_RUN = {
    "bash scripts/train.sh": "sets up .venv; the training that it starts is run by tests/test_example.py",
    "pip install -e .": "scripts/setup.sh does it, before the tests",
    "deepspeed train.py": "needs GPUs",
    "deepspeed --module deepspeed_distca.cli profile": "as under torchrun; tests/test_launchers.py has --module",
    "torchrun --nproc_per_node 8 -m deepspeed_distca.run -m llamafactory.launcher train.yaml": "needs LLaMA-Factory",
    "accelerate launch -m deepspeed_distca.run -m axolotl.cli.train train.yml": "needs axolotl",
    "deepspeed --hostfile hosts train.py": "needs several nodes",
    "srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 bash start.sh": "needs Slurm",
    "swift sft --external_plugins plugin.py --deepspeed ds_config.json --packing true ...": "needs ms-swift",
    "ls -l ~/.cache/torch_extensions/*/deepspeed_shm_comm/lock": "looks at the user's cache",
    "rm ~/.cache/torch_extensions/*/deepspeed_shm_comm/lock": "changes the user's cache",
}
#: Programs of this interpreter's environment come first, also where it is not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
#: Modules in examples that are not installed for tests.
FOREIGN = {"liger_kernel"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)


def anchors(text: str) -> list[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says(reference):
    text = reference.PAGE.read_text(encoding="utf-8")
    assert text == reference.page(text), "run: python scripts/make_reference.py"


def test_the_quickstart_is_the_readmes():
    index, readme = TEXTS[ROOT / "docs" / "index.md"], TEXTS[ROOT / "README.md"]
    for language in ("json", "python"):
        assert blocks(index, language) == blocks(readme, language)
    printed = re.search(r"^    loss \d.*$", index, re.MULTILINE)[0]
    assert printed in readme


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(TEXTS[path])):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.is_file(), f"{target} of {path.name}: no such file"
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{target} of {path.name}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_headings_have_one_anchor_on_github_and_on_the_site(path: Path):
    found = anchors(TEXTS[path])
    assert len(found) == len(set(found))
    # The site makes one hyphen of several.
    assert not [anchor for anchor in found if "--" in anchor or anchor != anchor.strip("-")]


def test_every_page_is_in_the_site():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = re.findall(r"'([\w.]+\.md)'", str(site["nav"]))
    assert sorted(pages) == sorted(["CHANGELOG.md", *(path.name for path in PAGES)])


@pytest.mark.skipif(
    not shutil.which("mkdocs", path=PATH), reason="mkdocs-material is not installed (pip install -e .[docs])"
)
def test_the_site_builds_without_a_warning(tmp_path: Path):
    done = run_program(
        ["bash", ROOT / "scripts" / "docs.sh", "--site-dir", tmp_path / "site"], environment={"PATH": PATH}
    )
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    built = {path.name for path in (tmp_path / "site" / "images").iterdir()}
    assert built == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def commands() -> list[tuple[Path, str]]:
    """The lines of the docs' bash blocks, without comments."""
    found = []
    for path in [ROOT / "README.md", *PAGES]:
        for block in blocks(TEXTS[path], "(?:bash|console|sh)"):
            found += [(path, line) for raw in block.splitlines() if (line := re.sub(r"(^|\s+)#.*", "", raw))]
    return found


@pytest.mark.parametrize(("path", "command"), commands(), ids=lambda value: getattr(value, "name", value))
def test_commands_are_run_by_a_test(path: Path, command: str, reference):
    if command in NOT_RUN:
        return
    known = max((begin for begin in RUN if command.startswith(begin)), key=len, default=None)
    assert known, f"{path.name} has {command!r}: name the test that runs it in RUN, or say in NOT_RUN why none does"
    test, words = RUN[known]
    assert words in (ROOT / test).read_text(encoding="utf-8"), f"{test} no longer has {words!r}"
    if known.startswith("ds_distca"):
        _, name, *options = shlex.split(command)
        parser = reference.argparse.ArgumentParser()
        reference.module_of(name).add_arguments(parser)
        parser.parse_args(options)


def test_known_commands_are_in_the_docs():
    lines = [command for _, command in commands()]
    assert [known for known in NOT_RUN if known not in lines] == []
    assert [known for known in RUN if not any(line.startswith(known) for line in lines)] == []


def test_commands_are_in_bash_blocks():
    """Not in indented ones, where the tests above would not see them."""
    begin = r"^    (bash|deepspeed|torchrun|accelerate|ds_distca|python|pip|pytest) .*$"
    for path in [ROOT / "README.md", *PAGES]:
        assert re.search(begin, TEXTS[path], re.MULTILINE) is None, path.name


def test_files_that_are_named_are_there():
    folders = [ROOT, PACKAGE, PACKAGE / "attention_server"]
    for path in PAGES:
        named = set(re.findall(r"\b(?:[\w.]+/)+[\w.]+\.(?:py|sh|yaml)\b", TEXTS[path]))
        gone = [name for name in named if not any((folder / name).exists() for folder in folders)]
        assert not gone, f"{path.name} names {gone}"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_imports_exist(path: Path):
    for block in blocks(TEXTS[path], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] not in FOREIGN:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{path.name}: {node.module} has no {alias.name}"
