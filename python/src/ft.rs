//! Fault-tolerant training: a replica's manager, DiLoCo over it, and its checkpoints on disk.
//!
//! A call of theirs may take its time, and on its way it asks for the training state or hands one over ([`states`]). It runs on a thread of its own,
//! without the GIL; the thread that called meanwhile answers those questions, where Python expects its own code to run, and sees to Ctrl-C.

mod checkpoints;
mod diloco;
mod replica;
mod states;

use pyo3::prelude::*;

/// Adds the classes of this module.
pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<replica::Participation>()?;
    m.add_class::<replica::PyReplica>()?;
    m.add_class::<checkpoints::PyCheckpoints>()?;
    m.add_class::<diloco::Round>()?;
    m.add_class::<diloco::PyDiloco>()
}
