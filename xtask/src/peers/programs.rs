//! The programs that are compared: where each comes from, how it is started, and why it cannot be.
//!
//! MPICH is a wheel pinned by hash, in a virtual environment in the user's cache; Open MPI is the system's (installed through
//! apt where we are root); PyTorch is used where it is, that of the tests of its backend too, or installed on request. Our C program is compiled with each MPI.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use super::operations::Operation;
use crate::venv::{MPICH, alone};
use crate::wheels::{self, on_path, quietly};
use crate::{debian, python};

const SOURCE: &str = include_str!("../../peers/collectives.c");
const SCRIPT: &str = include_str!("../../peers/collectives.py");

const COMPILE_LIMIT: Duration = Duration::from_secs(60);

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Which {
    /// oxccl's gloo, with the transport that it chooses.
    Ours,
    /// The same with tensors of the group's, which the ranks read in each other's memory.
    OursAlloc,
    /// oxccl's gloo over TCP on loopback.
    OursTcp,
    /// As the first, of the build that `--former` names.
    #[value(skip)]
    Former,
    /// The same over TCP on loopback.
    #[value(skip)]
    FormerTcp,
    /// MPICH in shared memory.
    Mpich,
    /// Open MPI in shared memory.
    Openmpi,
    /// Open MPI over TCP on loopback.
    OpenmpiTcp,
    /// PyTorch's Gloo over TCP on loopback.
    Gloo,
}

impl Which {
    pub(super) const ALL: [Self; 9] = [
        Self::Ours,
        Self::OursAlloc,
        Self::Former,
        Self::Mpich,
        Self::Openmpi,
        Self::OursTcp,
        Self::FormerTcp,
        Self::OpenmpiTcp,
        Self::Gloo,
    ];

    pub(super) fn is_ours(self) -> bool {
        matches!(self, Self::Ours | Self::OursAlloc | Self::OursTcp)
    }

    pub(super) fn is_former(self) -> bool {
        matches!(self, Self::Former | Self::FormerTcp)
    }

    /// Whether it is measured in `operation`.
    pub(super) fn measures(self, operation: Operation) -> bool {
        self != Self::OursAlloc || !operation.is_short()
    }

    /// What of ours it is compared with.
    pub(super) fn rival(self) -> Self {
        match self {
            Self::Ours | Self::OursAlloc | Self::Former | Self::Mpich | Self::Openmpi => Self::Ours,
            Self::OursTcp | Self::FormerTcp | Self::OpenmpiTcp | Self::Gloo => Self::OursTcp,
        }
    }

    /// Whether so many ranks make sense on so many cores.
    pub(super) fn can_run(self, ranks: usize, cores: usize) -> Result<(), String> {
        if self == Self::Mpich && ranks > cores {
            return Err(format!(
                "MPICH spins for ever: with {ranks} ranks on {cores} cores a call takes milliseconds"
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "oxccl",
            Self::OursAlloc => "oxccl alloc",
            Self::OursTcp => "oxccl tcp",
            Self::Former => "former oxccl",
            Self::FormerTcp => "former oxccl tcp",
            Self::Mpich => "MPICH",
            Self::Openmpi => "Open MPI",
            Self::OpenmpiTcp => "Open MPI tcp",
            Self::Gloo => "PyTorch Gloo",
        })
    }
}

/// How a program is started.
#[derive(Debug, Clone)]
pub(super) enum Program {
    /// `oxccl bench`, of now or of a former build.
    Oxccl {
        path: PathBuf,
        transport: &'static str,
        alloc: bool,
    },
    /// The compiled C program under its launcher.
    Mpi { launch: Vec<String>, binary: PathBuf },
    /// The script under a Python that has PyTorch.
    Torch { python: PathBuf, script: PathBuf },
}

/// Finds or installs `which`, where `oxccl` is its program if it is one of ours; the error says in words why it cannot be measured here.
pub(super) fn find(which: Which, oxccl: &Path, torch: bool) -> Result<Program, String> {
    let cache = wheels::cache().map_err(|e| format!("{e:#}"))?.join("peers");
    let ours = |transport| {
        Ok(Program::Oxccl {
            path: oxccl.to_owned(),
            transport,
            alloc: which == Which::OursAlloc,
        })
    };
    let found = match which {
        Which::Ours | Which::OursAlloc | Which::Former => ours("auto"),
        Which::OursTcp | Which::FormerTcp => ours("tcp"),
        Which::Mpich => mpich(),
        Which::Openmpi => openmpi(&cache, &[]),
        Which::OpenmpiTcp => openmpi(
            &cache,
            &[
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "tcp,self",
                "--mca",
                "btl_tcp_if_include",
                "lo",
            ],
        ),
        Which::Gloo => gloo(&cache, torch),
    };
    found.map_err(|e| format!("{e:#}"))
}

/// Compiles our C program with an MPI's compiler wrapper.
fn compile(mpicc: &Path, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let source = folder.join("collectives.c");
    let binary = folder.join("collectives");
    fs::write(&source, SOURCE).with_context(|| format!("cannot write {}", source.display()))?;
    let mut command = Command::new(mpicc);
    command.arg("-O2").arg("-o").arg(&binary).arg(&source);
    let what = mpicc.display().to_string();
    quietly(&what, &mut command, COMPILE_LIMIT, &folder.join("compile.log"))?;
    Ok(binary)
}

fn mpich() -> Result<Program> {
    let folder = alone(&MPICH)?;
    let binary = compile(&folder.join("bin/mpicc"), &folder.join("program"))?;
    let mut launch = vec![folder.join("bin/mpiexec").display().to_string()];
    launch.extend(["-bind-to", "core", "-n"].map(str::to_owned));
    Ok(Program::Mpi { launch, binary })
}

fn openmpi(cache: &Path, transport: &[&str]) -> Result<Program> {
    // Debian's names, so that no other MPI on the path is taken for it.
    let mut found = on_path(&["mpicc.openmpi"]).zip(on_path(&["mpirun.openmpi"]));
    if found.is_none() {
        debian::install(&["openmpi-bin", "libopenmpi-dev"])?;
        found = on_path(&["mpicc.openmpi"]).zip(on_path(&["mpirun.openmpi"]));
    }
    let (mpicc, mpirun) =
        found.ok_or_else(|| anyhow!("mpicc.openmpi and mpirun.openmpi are not on the path"))?;
    let binary = compile(&mpicc, &cache.join("openmpi"))?;
    let mut launch = vec![mpirun.display().to_string()];
    launch.extend(["--allow-run-as-root", "--oversubscribe"].map(str::to_owned));
    // As the others here: with more ranks than cores it binds none by itself.
    launch.extend(["--map-by", "core", "--bind-to", "core:overload-allowed"].map(str::to_owned));
    launch.extend(transport.iter().map(|&a| a.to_owned()));
    launch.push("-n".to_owned());
    Ok(Program::Mpi { launch, binary })
}

fn gloo(cache: &Path, may_install: bool) -> Result<Program> {
    let has_torch = |python: &Path| {
        let said = Command::new(python)
            .args(["-c", "import torch.distributed"])
            .output();
        said.is_ok_and(|out| out.status.success())
    };
    let folder = cache.join("torch");
    let python = match (on_path(&["python3"]), python::torch_in_the_cache()) {
        (Some(python), _) if has_torch(&python) => python,
        (_, Ok(installed)) if has_torch(&installed) => installed,
        _ if may_install => python::prepare_torch()?.join("bin/python"),
        _ => bail!("PyTorch is not installed (--with-torch installs it, gigabytes)"),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let script = folder.join("collectives.py");
    fs::write(&script, SCRIPT).with_context(|| format!("cannot write {}", script.display()))?;
    Ok(Program::Torch { python, script })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_compared_over_the_same_kind_of_transport() {
        for which in Which::ALL {
            assert!(which.rival().is_ours());
            let tcp = which.to_string().contains("tcp") || which == Which::Gloo;
            assert_eq!(which.rival() == Which::OursTcp, tcp, "{which}");
        }
    }

    #[test]
    fn a_spinning_peer_is_not_run_with_more_ranks_than_cores() {
        assert!(Which::Mpich.can_run(2, 2).is_ok());
        assert!(
            Which::Mpich
                .can_run(4, 2)
                .unwrap_err()
                .contains("4 ranks on 2 cores")
        );
        assert!(Which::Openmpi.can_run(4, 2).is_ok());
    }
}
