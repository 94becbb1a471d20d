# SPDX-License-Identifier: Apache-2.0
"""Packaging of deepspeed_distca. ``pip install -e .`` installs the plugin and the ``ds_distca`` command."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

setup(
    name="deepspeed_distca",
    version="0.1.0",
    description="Core attention disaggregation for DeepSpeed: attention of packed documents, balanced over all ranks",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["deepspeed_distca", "deepspeed_distca.*"]),
    package_data={"deepspeed_distca.scheduler": ["shipped/*.json"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.6",
        "transformers>=5.17",
        "numpy",
        "pydantic>=2",
        "rich",
    ],
    extras_require={
        # The fastest kernels for Hopper and Blackwell; a pure-Python wheel, nothing to compile.
        "gpu": ["flash-attn-4[cu13]>=4.0.0b36"],
        "data": ["datasets"],
        "dev": [
            "accelerate",
            "datasets",
            "hypothesis",
            "matplotlib",
            "peft",
            "psutil",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
