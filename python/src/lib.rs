//! The extension module behind the Python package `oxccl`: groups and worlds over the facade, on memory that Python lends.
//!
//! A call goes through `group` (arguments to a [`Collective`](oxccl::core::Collective)), `lend` (a Python object to a tensor over its memory)
//! and either runs on the calling thread without the GIL, watched by `interrupt` for Ctrl-C, or comes back as a `work`.
//! `raw` is the only module with unsafe code; `ft` drives a replica of fault-tolerant training. `process` knows whether this process was forked or ends; `errors` raises.

// Linked for their registration.
use oxccl::{gloo as _, nccl as _, xccl as _};
use pyo3::prelude::*;

mod clients;
mod command;
mod completions;
mod errors;
mod ft;
mod group;
mod interrupt;
mod lend;
mod memory;
mod options;
mod process;
mod quantized;
mod quorum;
mod raw;
mod servers;
mod store;
mod table;
mod work;
mod world;

/// The module `oxccl._oxccl`; what users see is `oxccl`.
#[pymodule]
fn _oxccl(m: &Bound<'_, PyModule>) -> PyResult<()> {
    raw::fork::watch();
    errors::prepare(m.py())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<group::Group>()?;
    m.add_class::<quantized::QuantizedGroup>()?;
    m.add_class::<group::PremulSum>()?;
    m.add_class::<memory::Memory>()?;
    m.add_class::<group::Send>()?;
    m.add_class::<group::Recv>()?;
    m.add_class::<store::Store>()?;
    m.add_class::<store::TcpStore>()?;
    m.add_class::<store::FileStore>()?;
    m.add_class::<store::PrefixStore>()?;
    m.add_class::<store::StoreServer>()?;
    servers::add(m)?;
    clients::add(m)?;
    ft::add(m)?;
    m.add_class::<completions::Completions>()?;
    m.add_class::<table::Capabilities>()?;
    m.add_class::<table::Traffic>()?;
    m.add_class::<work::Work>()?;
    m.add_class::<world::World>()?;
    m.add_function(wrap_pyfunction!(world::init, m)?)?;
    m.add_function(wrap_pyfunction!(world::unconfigured, m)?)?;
    m.add_function(wrap_pyfunction!(lend::know_torch, m)?)?;
    m.add_function(wrap_pyfunction!(table::backends, m)?)?;
    m.add_function(wrap_pyfunction!(table::leaked_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(command::command, m)?)?;
    m.add_function(wrap_pyfunction!(process::end, m)?)?;
    m.add_function(wrap_pyfunction!(process::run_child_if_asked, m)?)?;
    Ok(())
}
