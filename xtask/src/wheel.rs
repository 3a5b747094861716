//! The wheel of the Python package for many Linux systems on x86-64: built against an old glibc, which maturin checks in every symbol that it needs, then
//! installed into a new environment and tried.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::metadata::Metadata;
use crate::wheels::quietly;
use crate::{python, venv};

/// The C compiler and linker that know the old glibc's symbols.
const ZIG: &str = "ziglang==0.17.1";
/// The glibc that the wheel needs: 2.17, of 2012.
const COMPATIBILITY: &str = "manylinux_2_17";
const BUILD_LIMIT: Duration = Duration::from_secs(60 * 60);
const TRY_LIMIT: Duration = Duration::from_secs(2 * 60);

/// Two ranks reduce without anything but the wheel and the standard library.
const TRIAL: &str = r"
import array, multiprocessing, sys
def rank(number, address):
    import oxccl
    with oxccl.init(address, rank=number, world_size=2) as world:
        x = array.array('f', [number + 1.0] * 4)
        world.all_reduce(x)
        assert list(x) == [3.0] * 4, x
if __name__ == '__main__':
    context = multiprocessing.get_context('spawn')
    ranks = [context.Process(target=rank, args=(n, sys.argv[1])) for n in range(2)]
    for one in ranks: one.start()
    for one in ranks: one.join()
    sys.exit(any(one.exitcode for one in ranks))
";

/// Builds, installs and tries it; false never, since what fails is an error.
pub(crate) fn run() -> Result<bool> {
    let metadata = Metadata::read()?;
    let wheel = build(&metadata.workspace_root, &metadata.target_directory)?;
    tried(&wheel, &metadata.target_directory.join("wheel"))?;
    let size = fs::metadata(&wheel).map(|m| m.len()).unwrap_or(0);
    println!(
        "{} ({:.1} MB) needs glibc 2.17 and Python 3.{} or newer",
        wheel.display(),
        size as f64 / 1e6,
        python::OLDEST
    );
    Ok(true)
}

fn build(root: &Path, target: &Path) -> Result<PathBuf> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the wheel is built on Linux on x86-64");
    }
    let tools = python::prepare()?;
    let notice = "wheel: fetching zig, which links against an old glibc (90 MB, once)";
    let zig = venv::environment("python-zig", notice, &[ZIG], &[])?;
    let own = target.join("wheel");
    let built = own.join("built");
    let _ = fs::remove_dir_all(&built);
    fs::create_dir_all(&built).with_context(|| format!("cannot make {}", built.display()))?;
    println!(
        "wheel: building (some minutes; {})",
        own.join("build.log").display()
    );
    let mut maturin = Command::new(tools.join("bin/maturin"));
    maturin
        .args([
            "build",
            "--release",
            "--locked",
            "--zig",
            "--compatibility",
            COMPATIBILITY,
        ])
        .arg("--out")
        .arg(&built)
        .current_dir(root.join("python"))
        // Shared with the row `python`: build scripts and macros are the same.
        .env("CARGO_TARGET_DIR", target.join("python"))
        .env("PYTHONPATH", python::site_packages(&zig)?);
    quietly("maturin", &mut maturin, BUILD_LIMIT, &own.join("build.log"))?;
    let entries = fs::read_dir(&built).with_context(|| format!("cannot read {}", built.display()))?;
    let mut wheels = entries.flatten().map(|entry| entry.path());
    wheels
        .find(|path| path.extension().is_some_and(|end| end == "whl"))
        .ok_or_else(|| anyhow!("maturin left no wheel in {}", built.display()))
}

/// Installs it into an environment of its own and runs what it brings.
fn tried(wheel: &Path, own: &Path) -> Result<()> {
    let (venv, log) = (own.join("venv"), own.join("try.log"));
    let mut made = Command::new("python3");
    made.args(["-m", "venv", "--clear"]).arg(&venv);
    quietly("python3 -m venv", &mut made, TRY_LIMIT, &log)?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-index",
    ])
    .arg(wheel);
    quietly("pip install", &mut pip, TRY_LIMIT, &log)?;
    let mut version = Command::new(venv.join("bin/oxccl"));
    quietly("oxccl --version", version.arg("--version"), TRY_LIMIT, &log)?;
    let script = own.join("trial.py");
    fs::write(&script, TRIAL).with_context(|| format!("cannot write {}", script.display()))?;
    let meeting = own.join("meeting");
    let _ = fs::remove_file(&meeting);
    let mut trial = Command::new(venv.join("bin/python"));
    trial
        .arg(&script)
        .arg(format!("file://{}", meeting.display()))
        .env_remove("PYTHONPATH");
    quietly("an all-reduce of two ranks", &mut trial, TRY_LIMIT, &log)
}
