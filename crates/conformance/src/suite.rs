//! The whole suite: every case of every area.

use crate::case::{Case, Worlds};
use crate::{
    arguments, barriers, complex, failures, lifetime, messages, mismatch, movement, reductions, streams,
};

/// All cases at the small worlds, in a fixed order.
pub fn cases() -> Vec<Case> {
    cases_at(Worlds::Small)
}

/// The case of that name.
pub(crate) fn named(name: &str) -> Option<Case> {
    let all = [Worlds::Small, Worlds::Large].into_iter().flat_map(cases_at);
    all.into_iter().find(|c| c.name == name)
}

/// All cases at these worlds, in a fixed order.
pub fn cases_at(worlds: Worlds) -> Vec<Case> {
    let mut all = Vec::new();
    all.extend(reductions::cases(worlds));
    all.extend(movement::cases(worlds));
    all.extend(complex::cases(worlds));
    all.extend(messages::cases(worlds));
    all.extend(barriers::cases(worlds));
    all.extend(arguments::cases(worlds));
    all.extend(mismatch::cases(worlds));
    all.extend(failures::cases(worlds));
    all.extend(lifetime::cases(worlds));
    all.extend(streams::cases(worlds));
    all
}
