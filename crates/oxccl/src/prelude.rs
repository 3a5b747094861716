//! The names that most programs need: `use oxccl::prelude::*;`. Each feature of the crate adds those of its module.

pub use std::sync::Arc;
pub use std::time::Duration;

#[cfg(feature = "gloo")]
pub use backend_gloo::GlooGroup;
#[cfg(feature = "ddp")]
pub use ddp::{Ddp, DdpConfig, Slot};
#[cfg(feature = "diloco")]
pub use diloco::{Diloco, DilocoConfig, Parameters, SliceParameters};
pub use ftcore::{
    Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result, SubmitOptions, Tensor,
    deadline_in,
};
#[cfg(feature = "manager")]
pub use manager::{Manager, ManagerConfig};
#[cfg(feature = "quant")]
pub use quant::QuantizedGroup;
#[cfg(feature = "replica")]
pub use replica::{Replica, State, StateDict};
#[cfg(feature = "world")]
pub use world::{GroupSpec, Place, World, WorldOptions};

#[cfg(feature = "launch")]
pub use crate::launch::ReplicaEnv;
