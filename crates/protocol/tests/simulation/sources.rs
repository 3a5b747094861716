//! Which source a rank heals from: the ranks of a replica agree over the real [`Choice`], kept where they meet.

use oxccl_protocol::QuorumResult;
use oxccl_protocol::source::{Choice, Told, Within};

use crate::groups::Who;
use crate::trainer::{Offer, Taken};
use crate::world::World;

/// After so many looks a source that offers nothing is given up by this rank.
const TIME_LIMIT: u64 = 3;

impl World {
    /// The state that this rank is to take, if it can be had at present: whole, from one source. Sources may differ in the part of their
    /// own.
    pub(crate) fn offered_to(&mut self, who: Who, answer: &QuorumResult, tries: u64) -> Option<Offer> {
        let (mut have, mut out_of_reach, mut offers) = (Vec::new(), Vec::new(), Vec::new());
        for source in &answer.recover_sources {
            let (step, epoch) = (answer.max_step, answer.quorum_id);
            let found = self.offer_of(&source.manager_address, who.rank, step, epoch);
            let id = source.manager_address.clone();
            match found.filter(|(source, _)| self.reach(who, *source)) {
                Some((_, offer)) => {
                    let taken = Some(Taken {
                        epoch,
                        source: id.clone(),
                    });
                    have.push(id);
                    offers.push(Offer { taken, ..offer });
                }
                None => out_of_reach.push(id),
            }
        }
        if self.scenario.foreign {
            // torchft's ranks do not agree.
            return offers.into_iter().next();
        }
        // Which one answers first is chance.
        if have.len() > 1 && self.random.chance(500) {
            have.swap(0, 1);
            offers.swap(0, 1);
        }
        let none = Vec::new();
        let (lost, pending) = if tries < TIME_LIMIT {
            (&none, &out_of_reach)
        } else {
            (&out_of_reach, &none)
        };
        let (key, within) = (
            (who.slot, who.incarnation),
            Within {
                have: &have,
                lost,
                pending,
            },
        );
        if have.is_empty() {
            return None;
        }
        let told = Choice::follow(self.choices.get(&key), answer.quorum_id, answer.max_step, within);
        let Told::Follow(choice, _) = told else {
            return None;
        };
        let place = have.iter().position(|id| id == choice.source());
        self.choices.insert(key, choice);
        offers.into_iter().nth(place?)
    }

    /// The rank has the state of this source, and may load it.
    pub(crate) fn settles(&mut self, who: Who, answer: &QuorumResult, offer: &Offer) -> bool {
        if self.scenario.foreign {
            return true;
        }
        let source = offer.taken.as_ref().map(|t| t.source.clone());
        let (key, followed) = ((who.slot, who.incarnation), Vec::from_iter(source));
        let standing = self.choices.get(&key);
        let settled = standing.and_then(|c| c.settle(answer.quorum_id, answer.max_step, &followed));
        match settled {
            Some(choice) => self.choices.insert(key, choice).is_some(),
            None => false,
        }
    }
}
