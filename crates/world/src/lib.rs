//! Groups of ranks as a job sees them: which backends serve its devices, how its ranks find each other, which of them talk to
//! which.
//!
//! [`BackendSpec`] is what a user writes (`gloo`, `cpu:gloo,cuda:nccl`, or nothing); [`ByDevice`] is a group that hands each operation
//! to the backend of its tensors' device, and may have another one match messages by tag (`nccl,messages:gloo`); [`Place`] says which rank this process is and where the others are (from the variables of
//! torchrun, MPI, PALS or Slurm, or an address); [`World`] is the group of all ranks, from which [`World::new_group`] and [`World::split_group`] make
//! others; [`DeviceMesh`] arranges ranks in named dimensions, [`RankOrder`] in the ones of large-model training, and
//! [`Layout`] says who is in which group there.

mod by_device;
mod grid;
mod launcher;
mod layout;
mod layout_groups;
mod matched;
mod member;
mod mesh;
mod objects;
mod one_host;
mod order;
mod place;
mod rounds;
mod spec;
mod world;

pub use by_device::ByDevice;
pub use layout::{GroupKind, Layout, LayoutSpec};
pub use layout_groups::LayoutGroups;
pub use mesh::{DeviceMesh, MeshShape};
pub use objects::{ObjectOptions, all_gather_object, broadcast_object, gather_object, scatter_object};
pub use order::{Dimension, RankOrder, Sizes};
pub use place::{Host, Meeting, Place};
pub use spec::BackendSpec;
pub use world::{ENV_SPLIT_GROUPS, GroupSpec, Make, World, WorldOptions};
