//! Which source the ranks of one replica heal from, without IO.
//!
//! Sources of one step may differ in parts of their own, so that ranks that followed different ones would hold parts of two replicas.
//! The ranks share one [`Choice`]: the first rank that could follow a source names it, and the others follow it too. A rank that cannot
//! get it names another one, until a rank has loaded. From then on the choice moves only among the sources whose state every rank
//! that has loaded holds. So at any time one source exists whose state is what all ranks that have loaded hold: the chosen one.

use ftcore::{Epoch, Step};

/// The choice of one replica for one state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    quorum_id: Epoch,
    step: Step,
    source: String,
    /// Sources that some rank could not get.
    refused: Vec<String>,
    /// The sources whose state every rank that has loaded holds; `None`: no rank has loaded.
    loaded: Option<Vec<String>>,
}

/// What one rank can get, by replica id, in its order of preference.
#[derive(Debug, Clone, Copy, Default)]
pub struct Within<'a> {
    /// Sources that it could follow at once.
    pub have: &'a [String],
    /// Sources that it cannot get.
    pub lost: &'a [String],
    /// Sources that may answer yet.
    pub pending: &'a [String],
}

/// What a rank that asks for the choice is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// The choice, and whether it is new or changed: then it has to be written down.
    Follow(Choice, bool),
    /// None yet: the sources that this rank could follow were refused in the quorum before, and others may still answer.
    Wait,
    /// The ranks of this replica are at a later state.
    Late,
}

impl Choice {
    /// The choice for the state of `step` in the quorum, given what stands so far and what the asking rank can get.
    pub fn follow(standing: Option<&Self>, quorum_id: Epoch, step: Step, within: Within<'_>) -> Told {
        let now = (quorum_id, step);
        let current = match standing {
            Some(c) if (c.quorum_id, c.step) > now => return Told::Late,
            Some(c) if (c.quorum_id, c.step) == now => c,
            earlier => return Self::first(earlier, quorum_id, step, within),
        };
        if !within.lost.contains(&current.source) {
            return Told::Follow(current.clone(), false);
        }
        let mut choice = current.clone();
        if !choice.refused.contains(&current.source) {
            choice.refused.push(current.source.clone());
        }
        let may = |id: &&String| current.loaded.as_ref().is_none_or(|all| all.contains(id));
        let fresh = |id: &&String| !choice.refused.contains(id);
        let other = within.have.iter().filter(may);
        // Once a rank has loaded, any source of its state will do.
        let other = other.clone().find(fresh).or_else(|| {
            let mut other = other;
            other.next().filter(|_| current.loaded.is_some())
        });
        if let Some(id) = other {
            choice.source.clone_from(id);
        }
        let changed = choice != *current;
        Told::Follow(choice, changed)
    }

    fn first(earlier: Option<&Self>, quorum_id: Epoch, step: Step, within: Within<'_>) -> Told {
        // A source that only one rank can get would be chosen again and again.
        let avoided = earlier.map_or(&[][..], |c| &c.refused);
        let good = |id: &&String| !avoided.contains(id);
        let chosen = match within.have.iter().find(good) {
            Some(id) => id,
            None if within.pending.iter().any(|id| good(&id)) => return Told::Wait,
            None => match within.have.first() {
                Some(id) => id,
                None => return Told::Wait,
            },
        };
        let choice = Self {
            quorum_id,
            step,
            source: chosen.clone(),
            refused: within.lost.to_vec(),
            loaded: None,
        };
        Told::Follow(choice, true)
    }

    /// A rank is about to load a state that all of `followed` hold bit for bit. The choice as it has to be written down before the rank
    /// loads; `None` if it is another source by now, or of another state: the rank must not load.
    pub fn settle(&self, quorum_id: Epoch, step: Step, followed: &[String]) -> Option<Self> {
        if (self.quorum_id, self.step) != (quorum_id, step) || !followed.contains(&self.source) {
            return None;
        }
        let common = match &self.loaded {
            None => followed.to_vec(),
            Some(all) => all.iter().filter(|id| followed.contains(id)).cloned().collect(),
        };
        Some(Self {
            loaded: Some(common),
            ..self.clone()
        })
    }

    /// The source that is followed.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// As text, one entry a line; ids are without line breaks.
    pub fn write(&self) -> String {
        let mut text = format!("{} {}\n{}", self.quorum_id, self.step, self.source);
        for id in &self.refused {
            text.push_str("\nrefused ");
            text.push_str(id);
        }
        if let Some(all) = &self.loaded {
            text.push_str("\nloaded");
            for id in all {
                text.push_str("\nloaded ");
                text.push_str(id);
            }
        }
        text
    }

    /// What [`write`](Self::write) wrote; `None` for anything else.
    pub fn read(text: &str) -> Option<Self> {
        let mut lines = text.split('\n');
        let (quorum_id, step) = lines.next()?.split_once(' ')?;
        let mut choice = Self {
            quorum_id: Epoch(quorum_id.parse().ok()?),
            step: Step(step.parse().ok()?),
            source: lines.next()?.to_owned(),
            refused: Vec::new(),
            loaded: None,
        };
        for line in lines {
            match line.split_once(' ') {
                None if line == "loaded" => choice.loaded = Some(Vec::new()),
                Some(("refused", id)) => choice.refused.push(id.to_owned()),
                Some(("loaded", id)) => choice.loaded.get_or_insert_default().push(id.to_owned()),
                _ => return None,
            }
        }
        Some(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(all: &[&str]) -> Vec<String> {
        all.iter().map(|id| (*id).to_owned()).collect()
    }

    fn follow(
        standing: Option<&Choice>,
        key: (u64, i64),
        have: &[&str],
        lost: &[&str],
        pending: &[&str],
    ) -> Told {
        let (have, lost, pending) = (ids(have), ids(lost), ids(pending));
        let within = Within {
            have: &have,
            lost: &lost,
            pending: &pending,
        };
        Choice::follow(standing, Epoch(key.0), Step(key.1), within)
    }

    fn chosen(told: Told) -> Choice {
        match told {
            Told::Follow(choice, _) => choice,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_rank_that_can_follow_a_source_names_it_for_all() {
        let first = chosen(follow(None, (9, 5), &["b"], &[], &["a"]));
        assert_eq!(first.source(), "b");
        let second = follow(Some(&first), (9, 5), &["a"], &[], &["b"]);
        assert_eq!(second, Told::Follow(first.clone(), false));
        assert_eq!(follow(Some(&first), (8, 5), &["a"], &[], &[]), Told::Late);
        assert_eq!(
            chosen(follow(Some(&first), (9, 6), &["a"], &[], &[])).source(),
            "a"
        );
        assert_eq!(first.settle(Epoch(9), Step(5), &ids(&["a"])), None);
    }

    #[test]
    fn a_source_that_one_rank_cannot_get_is_left_while_no_rank_has_loaded() {
        let a = chosen(follow(None, (9, 5), &["a"], &[], &[]));
        let b = chosen(follow(Some(&a), (9, 5), &["b", "c"], &["a"], &[]));
        assert_eq!(b.source(), "b");
        assert_eq!(a.settle(Epoch(9), Step(5), &ids(&["a"])).unwrap().source(), "a");
        assert_eq!(
            b.settle(Epoch(9), Step(5), &ids(&["a"])),
            None,
            "the other rank must not load a's"
        );
        let c = chosen(follow(Some(&b), (9, 5), &["a", "c"], &["b"], &[]));
        assert_eq!(c.source(), "c", "a was refused before");
    }

    #[test]
    fn once_a_rank_has_loaded_only_sources_of_that_very_state_are_left() {
        let a = chosen(follow(None, (9, 5), &["a"], &[], &[]));
        let loaded = a.settle(Epoch(9), Step(5), &ids(&["a", "c"])).unwrap();
        let stuck = chosen(follow(Some(&loaded), (9, 5), &["b"], &["a"], &[]));
        assert_eq!(stuck.source(), "a", "this rank cannot heal in this quorum");
        let c = chosen(follow(Some(&loaded), (9, 5), &["b", "c"], &["a"], &[]));
        assert_eq!(c.source(), "c");
        // In the next quorum the source that failed a rank is the last resort.
        assert_eq!(follow(Some(&stuck), (10, 5), &["a"], &[], &["b"]), Told::Wait);
        assert_eq!(
            chosen(follow(Some(&stuck), (10, 5), &["a", "b"], &[], &[])).source(),
            "b"
        );
        assert_eq!(
            chosen(follow(Some(&stuck), (10, 5), &["a"], &["b"], &[])).source(),
            "a"
        );
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        let a = chosen(follow(None, (9, 5), &["a:1"], &["x:2", "y:3"], &[]));
        for choice in [
            a.clone(),
            a.settle(Epoch(9), Step(5), &ids(&["a:1", "b:4"])).unwrap(),
            Choice {
                loaded: Some(Vec::new()),
                ..a
            },
        ] {
            assert_eq!(Choice::read(&choice.write()), Some(choice));
        }
        for bad in ["", "9 5", "9\na", "9 5\na\nother b", "x 5\na"] {
            assert_eq!(Choice::read(bad), None, "{bad}");
        }
    }

    proptest! {
        /// Ranks ask, lose sources and load in any order: there is always one source whose state is what all that have loaded hold.
        #[test]
        fn ranks_that_loaded_hold_the_state_of_one_source(
            // For each rank: which of four sources hold the same state to it, and which it can get at all.
            groups in prop::collection::vec(prop::collection::vec(0usize..3, 4), 3),
            moves in prop::collection::vec((0usize..3, 0usize..6), 1..60),
        ) {
            let names = ids(&["a", "b", "c", "d"]);
            let mut standing: Option<Choice> = None;
            let mut lost = [const { Vec::<String>::new() }; 3];
            let mut loaded: [Option<Vec<String>>; 3] = [const { None }; 3];
            for (rank, what) in moves {
                if let Some(name) = names.get(what) {
                    if !lost[rank].contains(name) {
                        lost[rank].push(name.clone());
                    }
                    continue;
                }
                if loaded[rank].is_some() {
                    continue;
                }
                let have: Vec<String> = names.iter().filter(|n| !lost[rank].contains(n)).cloned().collect();
                let within = Within { have: &have, lost: &lost[rank], pending: &[] };
                let Told::Follow(choice, _) = Choice::follow(standing.as_ref(), Epoch(9), Step(5), within) else { continue };
                if what == 5 && have.iter().any(|n| n == choice.source()) {
                    let of = |n: &str| names.iter().position(|m| m == n).map(|i| groups[rank][i]);
                    let same: Vec<String> =
                        have.iter().filter(|n| of(n) == of(choice.source())).cloned().collect();
                    let settled = choice.settle(Epoch(9), Step(5), &same);
                    prop_assert!(settled.is_some());
                    standing = settled;
                    loaded[rank] = Some(same);
                    continue;
                }
                standing = Some(choice);
            }
            let held: Vec<_> = loaded.iter().flatten().collect();
            let common = names.iter().any(|n| held.iter().all(|same| same.contains(n)));
            prop_assert!(held.is_empty() || common, "{loaded:?}");
        }
    }
}
