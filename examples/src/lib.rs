//! Runnable training programs: train_diloco and train_ddp.
//!
//! This library holds what they share: data ([`text`], [`digits`]) and models on candle ([`transformer`],
//! [`digits::Mlp`]), each a pure function of its seed.

pub mod digits;
pub mod plot;
pub mod progress;
pub mod report;
pub mod rng;
pub mod text;
pub mod transformer;
mod weights;
pub mod chaos;
pub mod ddp_replica;
pub mod diloco_replica;
pub mod replica;
