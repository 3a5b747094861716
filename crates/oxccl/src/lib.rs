//! oxccl: fault-tolerant collectives and low-communication training. The facade: one crate to depend on.
//!
//! Every part lives in a crate of its own and appears here as a module, chosen by a feature of the same name (all on by
//! default): take less with `default-features = false`. [`core`] (types, traits, stores, the backend registry) is
//! always there. [`backend`], [`launch`] and [`flight_recorder`] are the facade's own: the first chooses a backend as the programs do, the second is
//! the side of a process that `oxccl launch` started, the third writes flight records on a signal. With the feature `otel` there is `telemetry`, for
//! OpenTelemetry. [`prelude`] has the names that most programs need. The
//! `oxccl` command is a package of its own, `oxccl-cli`.
//!
//! An all-reduce among the processes that a launcher started (`mpirun -n 2`, `torchrun`, `srun`, `oxccl launch`):
//!
//! ```no_run
//! use oxccl::prelude::*;
//!
//! fn main() -> Result<()> {
//!     let world = World::from_env()?;
//!     let mut values = [world.rank() as f32 + 1.0; 4];
//!     world.group().all_reduce_slice(&mut values, ReduceOp::Sum)?;
//!     println!("rank {} of {} has {values:?}", world.rank(), world.world_size());
//!     world.shutdown(deadline_in(Duration::from_secs(10)))
//! }
//! ```

#[cfg(feature = "gloo")]
pub use backend_gloo as gloo;
#[cfg(feature = "nccl")]
pub use backend_nccl as nccl;
#[cfg(feature = "xccl")]
pub use backend_xccl as xccl;
#[cfg(feature = "checkpoint")]
pub use checkpoint;
#[cfg(feature = "coordination")]
pub use coordination;
#[cfg(feature = "ddp")]
pub use ddp;
#[cfg(feature = "diloco")]
pub use diloco;
pub use ftcore as core;
#[cfg(feature = "identity")]
pub use identity;
#[cfg(feature = "isolate")]
pub use isolate;
#[cfg(feature = "manager")]
pub use manager;
#[cfg(feature = "plugin")]
pub use plugin;
#[cfg(feature = "quant")]
pub use quant;
#[cfg(feature = "quant-cuda")]
pub use quant_cuda;
#[cfg(feature = "replica")]
pub use replica;
#[cfg(feature = "world")]
pub use world;

#[cfg(feature = "backend")]
pub mod backend;
#[cfg(feature = "launch")]
pub mod flight_recorder;
#[cfg(feature = "launch")]
pub mod launch;

pub mod prelude;
#[cfg(feature = "otel")]
pub mod telemetry;

/// The programs of the README and of the pages that show calls, compiled as tests so that they stay true.
#[cfg(all(
    doctest,
    feature = "backend",
    feature = "diloco",
    feature = "gloo",
    feature = "launch",
    feature = "manager",
    feature = "world"
))]
mod documentation {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/checkpoints.md")]
    struct Checkpoints;
    #[doc = include_str!("../../../docs/ddp.md")]
    struct DataParallel;
    #[doc = include_str!("../../../docs/groups.md")]
    struct Groups;
    #[doc = include_str!("../../../docs/healing.md")]
    struct Healing;
    #[cfg(feature = "otel")]
    #[doc = include_str!("../../../docs/observability.md")]
    struct Observability;
    #[doc = include_str!("../../../docs/tolerance.md")]
    struct Tolerance;
}
