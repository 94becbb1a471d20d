# SPDX-License-Identifier: Apache-2.0
"""Packaging of deepspeed_distca. ``pip install -e .`` installs the plugin and the ``ds_distca`` command."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
#: Said there alone; the package cannot be imported before what it needs is installed.
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "deepspeed_distca/__init__.py").read_text(), re.MULTILINE)[1]

setup(
    name="deepspeed_distca",
    version=VERSION,
    description="Core attention disaggregation for DeepSpeed: attention of packed documents, balanced over all ranks",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The deepspeed_distca maintainers",
    project_urls={"Paper": "https://arxiv.org/abs/2510.18121"},
    keywords=[
        "attention",
        "deepspeed",
        "distributed training",
        "large language models",
        "load balancing",
        "long context",
        "sequence packing",
        "transformers",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["deepspeed_distca", "deepspeed_distca.*"]),
    package_data={"deepspeed_distca": ["py.typed"], "deepspeed_distca.scheduler": ["shipped/*.json"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8",
        "transformers>=5.17",
        "numpy",
        "pydantic>=2",
        "rich",
    ],
    extras_require={
        # The fastest kernels for Hopper and Blackwell; a pure-Python wheel, nothing to compile.
        "gpu": ["flash-attn-4[cu13]>=4.0.0b36"],
        "data": ["datasets"],
        "docs": ["mkdocs-material"],
        "dev": [
            "accelerate",
            "datasets",
            "hypothesis",
            # Its kernels run under Triton's interpreter as well; without it one test is skipped.
            "liger-kernel; platform_system == 'Linux'",
            "matplotlib",
            "mkdocs-material",  # the tests build the site
            "mypy>=2.4",
            "peft",
            "psutil",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",  # scripts/check_package.sh builds with it
            # Its interpreter runs the kernels on CPU; PyTorch's CPU builds come without it.
            "triton; platform_system == 'Linux'",
            "trl",
        ],
    },
    entry_points={"console_scripts": ["ds_distca = deepspeed_distca.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
