//! Runnable training programs: train_diloco and train_ddp.
//!
//! Each program ([`program`]) is a driver ([`drive`]) that starts itself again as replicas ([`diloco_replica`], [`ddp_replica`], with
//! [`replica`] in common). Data ([`text`], [`digits`]) and models on candle ([`transformer`], [`digits::Mlp`]) are pure
//! functions of a seed. What a run reports becomes a [`report`] and a picture ([`plot`]).

pub mod campaign;
pub mod chaos;
pub mod compare;
pub mod data_parallel;
pub mod ddp_replica;
pub mod device;
pub mod digits;
pub mod diloco_replica;
pub mod drive;
pub mod plot;
pub mod program;
pub mod progress;
pub mod ranks;
pub mod replica;
pub mod report;
pub mod resume;
pub mod rng;
pub mod text;
pub mod transformer;
mod weights;
