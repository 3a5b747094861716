//! Rank 0's words while a communicator is made out of an older one, as text in frames. Nothing is believed that does not fit (INV-10).

use super::record::{Id, hex, unhex};
use crate::plan::{Holding, Reuse};

/// Rank 0's word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word {
    /// Make it like this.
    Plan(Reuse),
    /// Make a new one with this id.
    Fresh(Id),
    /// The id for the newcomers of the plan.
    Grow(Id),
    /// The plan failed somewhere: nobody need go on with it.
    Stop,
    /// Everybody has it: go on.
    Stands,
}

impl Word {
    pub(crate) fn encode(&self) -> String {
        match self {
            Self::Plan(plan) => plan.encode(),
            Self::Fresh(id) => format!("id {}", hex(id)),
            Self::Grow(id) => format!("grow {}", hex(id)),
            Self::Stop => "stop".to_string(),
            Self::Stands => "stands".to_string(),
        }
    }

    pub(crate) fn decode(text: &str, own: Option<&Holding>, rank: u32, world: u32) -> Option<Self> {
        let id = |hex: &str| unhex(hex);
        match text.split_once(' ') {
            None if text == "stands" => Some(Self::Stands),
            None if text == "stop" => Some(Self::Stop),
            Some(("id", hex)) => Some(Self::Fresh(id(hex)?)),
            Some(("grow", hex)) => Some(Self::Grow(id(hex)?)),
            _ => Reuse::decode(text, own, rank, world).map(Self::Plan),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::ID;
    use super::*;

    #[test]
    fn words_survive_the_wire_and_nonsense_does_not() {
        let id = [9; ID];
        for word in [Word::Fresh(id), Word::Grow(id), Word::Stop, Word::Stands] {
            assert_eq!(Word::decode(&word.encode(), None, 1, 2), Some(word));
        }
        for text in [
            "",
            "id",
            "id 00",
            "grow zz",
            "fresh",
            "stands up",
            "reuse 2 split",
        ] {
            assert_eq!(Word::decode(text, None, 1, 2), None, "'{text}'");
        }
    }
}
