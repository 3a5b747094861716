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

#[cfg(test)]
mod tests {
    use ftcore::{Capabilities, DType, DTypeSet, Feature, FeatureSet, OpKind, OpSet};

    use super::*;

    /// All of one dtype.
    fn backend(ops: &[OpKind], dtype: DType) -> Capabilities {
        Capabilities {
            ops: OpSet::of(ops),
            moves: DTypeSet::of(&[dtype]),
            reduces: std::array::from_fn(|_| DTypeSet::of(&[dtype])),
            features: FeatureSet::of(&Feature::ALL),
            options: Vec::new(),
            devices: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn is_run(name: &str, on: &Capabilities) -> bool {
        let all = cases();
        let mut named = all.iter().filter(|case| case.name.starts_with(name)).peekable();
        assert!(named.peek().is_some(), "{name}");
        named.all(|case| case.unmet(on, true).is_none())
    }

    #[test]
    fn a_case_that_would_find_nothing_to_do_is_not_passed() {
        let of_integers = backend(&OpKind::ALL, DType::I64);
        let of_floats = backend(&OpKind::ALL, DType::F32);
        for name in [
            "broadcast::l16_moved_bools_are_canonical",
            "all_reduce::bitwise_equal_on_all_ranks",
            "all_reduce::contributors_are_counted",
            "reduce::contributors_in_reduce",
            "complex::",
        ] {
            assert!(!is_run(name, &of_integers), "{name}");
            let bools = name.contains("bools");
            assert_eq!(is_run(name, &of_floats), !bools, "{name}");
        }
        assert!(is_run(
            "broadcast::l16_moved_bools_are_canonical",
            &backend(&OpKind::ALL, DType::Bool)
        ));
        let sums_only = backend(&[OpKind::AllReduce], DType::F32);
        assert!(!is_run("complex::numbers_are_moved_as_they_are", &sums_only));
        assert!(is_run(
            "complex::sums_and_averages_are_those_of_the_parts",
            &sums_only
        ));
    }

    #[test]
    fn a_case_that_calls_an_operation_needs_it() {
        let without = |missing: OpKind| {
            let ops: Vec<OpKind> = OpKind::ALL.into_iter().filter(|op| *op != missing).collect();
            backend(&ops, DType::F32)
        };
        let name = "monitored_barrier::names_the_missing_ranks_on_every_rank";
        assert!(!is_run(name, &without(OpKind::Barrier)) && is_run(name, &without(OpKind::Reduce)));
    }
}
