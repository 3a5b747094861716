//! The Python package: an environment with its tools in the user's cache, the package built and installed as a user would, and its checks.
//!
//! The environments in the cache are shared by all work trees and hold only what comes from PyPI: the tools (60 MB), torch, with which its backend is
//! tested, and JAX, for an example. The package goes into one of its own below the target directory, which looks into the shared ones.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::libtest::Tally;
use crate::metadata::cargo_command;
use crate::venv::{environment, install};
use crate::wheels::{self, Place, Unfetched};

/// Pinned: what they complain about differs between versions. NumPy is the newest that this Python can have.
const REQUIREMENTS: &[&str] = &[
    "maturin==1.16.0",
    "ml_dtypes==0.6.0",
    "mypy==2.4.1",
    "numpy",
    "pytest==9.2.0",
    "ruff==0.17.6",
    "typing_extensions==4.16.0",
];
/// The oldest Python that the package runs on.
pub(crate) const OLDEST: u32 = 10;

/// torch, and torchft for its tests. torch's wheel loads CUDA's libraries also where there is no GPU; what only a GPU needs besides (Triton) is left out.
const TORCH: &[&str] = &[
    "torch==2.15.0",
    "torchft==0.2.0",
    "nvidia-cublas==13.4.1.3",
    "nvidia-cuda-cupti==13.2.86",
    "nvidia-cuda-nvrtc==13.2.86",
    "nvidia-cuda-runtime==13.2.86",
    "nvidia-cudnn-cu13==9.26.0.51",
    "nvidia-cufft==12.2.0.57",
    "nvidia-cufile==1.17.1.22",
    "nvidia-cusolver==12.2.0.11",
    "nvidia-cusparse==12.7.10.12",
    "nvidia-cusparselt-cu13==0.8.1",
    "nvidia-nccl-cu13==2.30.7",
    "nvidia-nvjitlink==13.5.37",
    "nvidia-nvshmem-cu13==3.7.2",
];
/// What these two need besides.
const BESIDES: &[&str] = &[
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "opentelemetry-exporter-otlp-proto-http==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "parameterized==0.9.0",
    "sympy",
];

/// JAX for the CPU, for its example. NumPy and `ml_dtypes` are among the tools.
const JAX: &[&str] = &[
    "jax==0.10.2",
    "jaxlib==0.10.2",
    "opt_einsum==3.4.0",
    "scipy==1.17.1",
];

/// JAX in the cache; made on the first call, found by later ones.
fn prepare_jax() -> Result<PathBuf> {
    environment(
        &format!("python-jax-3{}", minor_version()?),
        "python: fetching JAX for its example (125 MB, once; 530 MB on disk)",
        JAX,
        &["--no-deps", "--no-cache-dir"],
    )
}

/// The Python that has torch, if [`prepare_torch`] was called here once.
pub(crate) fn torch_in_the_cache() -> Result<PathBuf> {
    Ok(wheels::cache()?.join(torch_folder()?).join("bin/python"))
}

fn torch_folder() -> Result<String> {
    Ok(format!("python-torch-3{}", minor_version()?))
}

/// torch in the cache; made on the first call, found by later ones.
pub(crate) fn prepare_torch() -> Result<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the pinned wheels of torch are for Linux on x86-64");
    }
    let place = Place {
        folder: &torch_folder()?,
        recipe: &[TORCH, BESIDES].concat().join(" "),
        notice: "python: fetching torch for the tests of its backend (2.1 GB, once; 4.4 GB on disk)",
    };
    wheels::make_once(&place, |fresh| {
        install(fresh, TORCH, &["--no-deps", "--no-cache-dir"])?;
        install(fresh, BESIDES, &[])
    })
}

/// The environment in the cache; made on the first call, found by later ones.
pub(crate) fn prepare() -> Result<PathBuf> {
    if !wheels::is_program("python3") {
        bail!("python3 is missing");
    }
    let minor = minor_version()?;
    if minor < OLDEST {
        bail!("python3 is 3.{minor}; the package needs 3.{OLDEST}");
    }
    environment(
        &format!("python-tools-3{minor}"),
        "python: fetching the tools of the Python package (60 MB, once)",
        REQUIREMENTS,
        &[],
    )
}

/// The minor version of python3.
pub(crate) fn minor_version() -> Result<u32> {
    let said = Command::new("python3")
        .args(["-c", "import sys; print(sys.version_info.minor)"])
        .output()
        .context("cannot start python3")?;
    let text = String::from_utf8_lossy(&said.stdout);
    text.trim()
        .parse()
        .map_err(|_| anyhow!("python3 does not say its version but {text:?}"))
}

/// One thing that the row does.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) command: Command,
}

/// Where the tests find why there is no torch here, or no JAX.
const NO_TORCH: &str = "OXCCL_TEST_NO_TORCH";
const NO_JAX: &str = "OXCCL_TEST_NO_JAX";

/// What builds and installs the package, and what checks it then; the last step runs the tests. Where torch or JAX cannot be fetched, their tests are
/// skipped.
pub(crate) fn steps(root: &Path, target: &Path) -> Result<(Vec<Step>, Vec<Step>)> {
    let tools = prepare()?;
    let (torch, jax) = (prepare_torch(), prepare_jax());
    for (name, prepared) in [("torch", &torch), ("JAX", &jax)] {
        if let Err(error) = prepared
            && !error.is::<Unfetched>()
        {
            bail!("{name}: {error:#}");
        }
    }
    let package = root.join("python");
    let own = target.join("python");
    let installed = own.join("venv");
    fs::create_dir_all(&own).with_context(|| format!("cannot make {}", own.display()))?;
    // Scripts in the shared environment name the folder in which it was made, so its programs are called as modules; maturin is a binary.
    let path = with_first(&tools.join("bin"))?;
    let python = |python: &Path, arguments: &[&str]| {
        let mut command = Command::new(python.join("bin/python"));
        command
            .args(arguments)
            .current_dir(&package)
            .env("PATH", &path)
            .env("CARGO_TARGET_DIR", &own)
            // `cargo xtask wheel` makes what is measured.
            .env("MATURIN_PEP517_ARGS", "--profile tested")
            .env("MYPY_CACHE_DIR", own.join("mypy"))
            .env("RUFF_CACHE_DIR", own.join("ruff"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("NO_COLOR", "1")
            .env_remove("PYTHONPATH")
            .env_remove("PYTEST_ADDOPTS");
        command
    };
    let venv = installed.to_string_lossy().into_owned();
    let mut others = vec![site_packages(&tools)?.display().to_string()];
    for found in [&torch, &jax].into_iter().flatten() {
        others.push(site_packages(found)?.display().to_string());
    }
    let look = format!(
        "import pathlib, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'others.pth').write_text(chr(10).join({others:?}) + chr(10))"
    );
    let own_python = installed.join("bin/python").to_string_lossy().into_owned();
    let mut fmt = cargo_command(&package);
    fmt.args(["fmt", "--check"]);
    let step = |name, command| Step { name, command };
    let build = vec![
        step(
            "venv",
            python(&tools, &["-m", "venv", "--without-pip", "--clear", &venv]),
        ),
        step("venv", python(&installed, &["-c", &look])),
        step(
            "pip install",
            python(
                &tools,
                &[
                    "-m",
                    "pip",
                    "--python",
                    &own_python,
                    "install",
                    "--disable-pip-version-check",
                    "--no-deps",
                    "--no-build-isolation",
                    "--no-index",
                    ".",
                ],
            ),
        ),
    ];
    let mut pytest = python(
        &installed,
        &[
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "-rfs",
            // Where the row's minutes go; the log has it.
            "--durations=20",
        ],
    );
    for (name, prepared) in [(NO_TORCH, &torch), (NO_JAX, &jax)] {
        if let Err(error) = prepared {
            pytest.env(name, format!("{error:#}"));
        }
    }
    let check = vec![
        step("cargo fmt", fmt),
        step("ruff check", python(&installed, &["-m", "ruff", "check"])),
        step(
            "ruff format",
            python(&installed, &["-m", "ruff", "format", "--check"]),
        ),
        step("mypy", python(&installed, &["-m", "mypy"])),
        step("pytest", pytest),
    ];
    Ok((build, check))
}

/// `PATH` with `folder` in front.
fn with_first(folder: &Path) -> Result<OsString> {
    let old = env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(folder.to_path_buf()).chain(env::split_paths(&old));
    env::join_paths(all).context("PATH cannot be extended")
}

pub(crate) fn site_packages(venv: &Path) -> Result<PathBuf> {
    let lib = venv.join("lib");
    let entries = fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))?;
    let mut found = entries.flatten().map(|e| e.path().join("site-packages"));
    found
        .find(|path| path.is_dir())
        .ok_or_else(|| anyhow!("{} has no site-packages", lib.display()))
}

/// Counts the tests in pytest's last line, `2 failed, 5 passed, 1 skipped in 3.21s`, and the names of those that failed.
pub(crate) fn tally(output: &str) -> Tally {
    let mut tally = Tally::default();
    for name in output.lines().filter_map(|line| line.strip_prefix("FAILED ")) {
        let name = name.split(" - ").next().unwrap_or(name);
        tally.failures.push(name.to_owned());
    }
    let counts = output.lines().rev().find_map(|line| {
        let line = line.trim_matches(|c| c == '=' || c == ' ');
        let (counts, time) = line.rsplit_once(" in ")?;
        time.contains('s').then_some(counts)
    });
    for item in counts.unwrap_or_default().split(", ") {
        let Some((number, word)) = item.split_once(' ') else {
            continue;
        };
        let Ok(number) = number.parse::<u64>() else {
            continue;
        };
        match word {
            "passed" | "xpassed" => tally.passed += number,
            "failed" | "error" | "errors" => tally.failed += number,
            "skipped" | "deselected" | "xfailed" => tally.ignored += number,
            _ => {}
        }
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_pytest_is_counted_and_failures_are_named() {
        let found = tally(
            "..F.\nFAILED tests/test_a.py::test_x[1-2] - assert 1 == 2\nFAILED tests/test_b.py::test_y\n2 failed, 15 passed, 3 skipped in 4.02s\n",
        );
        assert_eq!((found.passed, found.failed, found.ignored), (15, 2, 3));
        assert_eq!(
            found.failures,
            ["tests/test_a.py::test_x[1-2]", "tests/test_b.py::test_y"]
        );
        let found = tally("....\n==== 4 passed, 1 error in 62.10s (0:01:02) ====\n");
        assert_eq!((found.passed, found.failed), (4, 1));
    }

    #[test]
    fn a_pytest_that_was_killed_counts_for_nothing() {
        assert_eq!(tally("....Fatal Python error: Segmentation fault\n").ran(), 0);
        assert_eq!(tally("no tests ran in 0.01s\n").ran(), 0);
    }
}
