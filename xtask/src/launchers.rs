//! The launchers of the rows `mpich`, `open-mpi`, `torchrun` and `slurm`: installed once, and where they are.

use anyhow::{Result, bail};

use crate::venv::{MPICH, OPEN_MPI, alone};
use crate::wheels::is_program;
use crate::{debian, matrix, python};

/// Slurm's daemons and tools, and what it proves identities with.
const SLURM: [&str; 2] = ["munge", "slurm-wlm"];

pub(crate) fn mpich() -> Result<matrix::Environment> {
    let folder = alone(&MPICH)?;
    let mpiexec = folder.join("bin/mpiexec").display().to_string();
    Ok(vec![("OXCCL_TEST_MPICH".to_owned(), mpiexec)])
}

pub(crate) fn open_mpi() -> Result<matrix::Environment> {
    let folder = alone(&OPEN_MPI)?;
    let mpirun = folder.join("bin/mpirun").display().to_string();
    Ok(vec![("OXCCL_TEST_OPEN_MPI".to_owned(), mpirun)])
}

/// A Python that has torch, and its launcher with it: the environment of the row `python`. Its scripts hold the path of the folder that it was made in.
pub(crate) fn torchrun() -> Result<matrix::Environment> {
    let python = python::prepare_torch()?.join("bin/python").display().to_string();
    Ok(vec![("OXCCL_TEST_TORCHRUN".to_owned(), python)])
}

/// A cluster of the tests' own, which only root can start.
pub(crate) fn slurm() -> Result<matrix::Environment> {
    let programs = ["munged", "slurmctld", "slurmd", "srun", "setpriv", "unshare"];
    let missing = || programs.iter().find(|name| !is_program(name));
    if !rustix::process::geteuid().is_root() {
        bail!("only root can start Slurm's daemons");
    }
    if missing().is_some() {
        debian::install(&SLURM)?;
    }
    if let Some(name) = missing() {
        bail!("{name} is missing after the installation of {}", SLURM.join(" "));
    }
    Ok(vec![("OXCCL_TEST_SLURM".to_owned(), "1".to_owned())])
}
