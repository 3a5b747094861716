//! The state that a peer offers, found by its address as a transfer finds it.

use super::*;
use crate::trainer::Offer;
use ftcore::{Epoch, Step};

impl World {
    /// A state that a peer offers, as it is now.
    pub(crate) fn offer_of(
        &mut self,
        address: &str,
        rank: u32,
        step: Step,
        epoch: Epoch,
    ) -> Option<(Who, Offer)> {
        let slot: usize = address
            .strip_prefix("http://10.0.0.")?
            .split(':')
            .next()?
            .parse()
            .ok()?;
        let incarnation = self.replicas.get(slot)?.as_ref()?.incarnation;
        let who = Who {
            slot,
            incarnation,
            rank,
        };
        if !address.ends_with(&format!(":{}", 1000 + incarnation)) {
            return None;
        }
        let offer = self
            .trainer(who)?
            .offers
            .iter()
            .find(|o| (o.step, o.epoch) == (step, epoch))?
            .clone();
        Some((who, offer))
    }
}
