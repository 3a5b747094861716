//! What the links between ranks carry, and which share of a sum each rank had better own for it.
//!
//! If rank i owns share x(i) of a tensor of S bytes, and each part goes to its owner and from there to all, rank i sends and receives
//! (1 + (n - 2) x(i)) S, and i and j carry (x(i) + x(j)) S each way. The time is the largest of these over the rates. No way needs less than
//! S on each rank's link, nor less than 2 (n - 1) S on all of them together, and this one needs no more: with the best
//! shares it is the optimum, unless the link between two ranks is worse than their own ones.

/// What all shares make together.
pub(crate) const WHOLE: u32 = 1 << 16;
/// A ring stays unless shares take less than so much of its time: measured rates are not that exact, and several streams do not fill a
/// line as well as the ring's one does.
const WORTH: f64 = 0.75;
/// What goes between two ranks when one of them talks to all counts as a limit of its own below this part of what the others get on average.
const OWN_LIMIT: f64 = 0.25;
/// Steps of the search for the time: each halves what is unknown.
const STEPS: usize = 60;

/// What links carry, in bytes a second; the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rates {
    /// By rank, in the slower direction.
    ranks: Vec<f64>,
    /// Pairs of ranks whose own link is a limit, and what it carries in the slower direction.
    pairs: Vec<(usize, usize, f64)>,
}

/// What one rank has seen, by rank, in bytes a second.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// What came from each while this rank talked to all at once.
    pub(crate) own_turn: Vec<u64>,
    /// What came from each while that one talked to all.
    pub(crate) their_turn: Vec<u64>,
}

fn at(list: &[u64], index: usize) -> f64 {
    list.get(index).copied().unwrap_or(0) as f64
}

impl Rates {
    #[cfg(test)]
    pub(super) fn new(ranks: Vec<f64>, pairs: Vec<(usize, usize, f64)>) -> Self {
        Self { ranks, pairs }
    }

    /// Of what every rank has seen.
    pub(crate) fn of(seen: &[Seen]) -> Self {
        let world = seen.len();
        let others = (world.max(2) - 1) as f64;
        // In floats: what other ranks report may be any number.
        let into: Vec<f64> = seen
            .iter()
            .map(|s| s.own_turn.iter().map(|n| *n as f64).sum())
            .collect();
        let out: Vec<f64> = (0..world)
            .map(|rank| seen.iter().map(|s| at(&s.their_turn, rank)).sum())
            .collect();
        // A link over which nothing came is not worth nothing: it is slow, and must not make a time infinite.
        let ranks = into.iter().zip(&out).map(|(i, o)| i.min(*o).max(1.0)).collect();
        // From one rank to another: a limit only if it was one in the turns of both, else others had what it could have had.
        let limit = |from: usize, to: usize| -> Option<f64> {
            let of = seen.get(to)?;
            let (first, second) = (at(&of.their_turn, from), at(&of.own_turn, from));
            let fair = [out.get(from)? / others, into.get(to)? / others];
            let limited = first < OWN_LIMIT * fair[0] && second < OWN_LIMIT * fair[1];
            limited.then_some(first.max(second).max(1.0))
        };
        let mut pairs = Vec::new();
        for i in 0..world {
            for j in i + 1..world {
                let ways = [limit(i, j), limit(j, i)];
                if let Some(least) = ways.into_iter().flatten().reduce(f64::min) {
                    pairs.push((i, j, least));
                }
            }
        }
        Self { ranks, pairs }
    }

    /// Seconds for a byte of a tensor that is shared so.
    pub(crate) fn time(&self, shares: &[f64]) -> f64 {
        let share = |rank: usize| shares.get(rank).copied().unwrap_or(0.0);
        let more = self.ranks.len().saturating_sub(2) as f64;
        let ranks = self.ranks.iter().enumerate();
        let ranks = ranks.map(|(rank, rate)| (1.0 + more * share(rank)) / rate);
        let pairs = self
            .pairs
            .iter()
            .map(|&(i, j, rate)| (share(i) + share(j)) / rate);
        ranks.chain(pairs).fold(0.0, f64::max)
    }

    /// The same for a ring, in which all links carry the same.
    fn time_of_ring(&self) -> f64 {
        let world = self.ranks.len();
        let next = |i: usize, j: usize| j == i + 1 || (i == 0 && j + 1 == world);
        let pairs = self.pairs.iter().filter(|(i, j, _)| next(*i, *j));
        let rates = self.ranks.iter().copied().chain(pairs.map(|(_, _, rate)| *rate));
        2.0 * (1.0 - 1.0 / world.max(1) as f64) / rates.fold(f64::INFINITY, f64::min)
    }

    /// The shares with the least time. Ranks whose own links decide get as little as they must, and the others as much as their links
    /// carry in the least time that is enough for the rest.
    pub(crate) fn best(&self) -> Vec<f64> {
        let world = self.ranks.len().max(1);
        let slowest = self.ranks.iter().copied().fold(f64::INFINITY, f64::min);
        let (mut low, mut high) = (0.0, 2.0 * world as f64 / slowest);
        for (_, _, rate) in &self.pairs {
            high = f64::max(high, 2.0 / rate);
        }
        for _ in 0..STEPS {
            let middle = (low + high) / 2.0;
            match self.fill(middle).iter().sum::<f64>() >= 1.0 {
                true => high = middle,
                false => low = middle,
            }
        }
        let shares = self.fill(high);
        let total: f64 = shares.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        shares.iter().map(|x| x / total).collect()
    }

    /// The most that can be owned in that time a byte, by rank.
    fn fill(&self, time: f64) -> Vec<f64> {
        let more = self.ranks.len().saturating_sub(2).max(1) as f64;
        let ranks = self.ranks.iter();
        let upper: Vec<f64> = ranks
            .map(|rate| ((time * rate - 1.0) / more).clamp(0.0, 1.0))
            .collect();
        let most = |rank: usize| upper.get(rank).copied().unwrap_or(0.0);
        let limits = self.pairs.iter().map(|&(i, j, rate)| (i, j, time * rate));
        let limits: Vec<_> = limits
            .filter(|&(i, j, limit)| most(i) + most(j) > limit)
            .collect();
        match limits.is_empty() {
            true => upper,
            false => largest_sum(&upper, &limits),
        }
    }

    /// Whole shares of [`WHOLE`], the same on every rank; `None` if a ring is as good.
    pub(crate) fn shares(&self) -> Option<Vec<u32>> {
        let best = self.best();
        let worth = self.time(&best) < WORTH * self.time_of_ring();
        worth.then(|| {
            let (mut sum, mut before) = (0.0, 0);
            let ends = best.iter().map(|x| {
                sum += x;
                ((sum * f64::from(WHOLE)).round() as u32).min(WHOLE)
            });
            let mut shares: Vec<u32> = ends
                .map(|end| {
                    let share = end.saturating_sub(before);
                    before = end.max(before);
                    share
                })
                .collect();
            // What rounding has left is the largest owner's.
            if let Some(largest) = shares.iter_mut().max() {
                *largest += WHOLE - before;
            }
            shares
        })
    }
}

/// A point x with 0 ≤ x(i) ≤ upper(i) and x(i) + x(j) ≤ limit for each of `limits` whose sum is largest: the simplex method, begun at zero, with Bland's
/// rule, so it ends.
fn largest_sum(upper: &[f64], limits: &[(usize, usize, f64)]) -> Vec<f64> {
    const NONE: f64 = 1e-12;
    let n = upper.len();
    // Each row: coefficients of what is zero now, and the bound. Who is zero, and who has the row's value: numbers below n are x.
    let row = |ones: &[usize], bound: f64| -> Vec<f64> {
        let coefficients = (0..n).map(|k| if ones.contains(&k) { 1.0 } else { 0.0 });
        coefficients.chain([bound]).collect()
    };
    let bounds = upper.iter().enumerate().map(|(i, bound)| row(&[i], *bound));
    let pairs = limits.iter().map(|(i, j, bound)| row(&[*i, *j], *bound));
    let mut rows: Vec<Vec<f64>> = bounds.chain(pairs).collect();
    let mut gain: Vec<f64> = vec![1.0; n];
    let mut zero: Vec<usize> = (0..n).collect();
    let mut holds: Vec<usize> = (n..n + rows.len()).collect();
    // Far more than it takes.
    for _ in 0..1000 {
        let gains = zero
            .iter()
            .zip(&gain)
            .enumerate()
            .filter(|(_, (_, g))| **g > NONE);
        let Some(column) = gains.min_by_key(|(_, (name, _))| **name).map(|(k, _)| k) else {
            break;
        };
        let coefficient = |row: &[f64]| row.get(column).copied().unwrap_or(0.0);
        let bound = |row: &[f64]| row.last().copied().unwrap_or(0.0);
        let candidates = rows.iter().zip(&holds).enumerate();
        let candidates = candidates.filter(|(_, (row, _))| coefficient(row) > NONE);
        let ratios = candidates.map(|(r, (row, name))| (bound(row) / coefficient(row), *name, r));
        let chosen = ratios.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let Some((_, _, chosen)) = chosen else { break };
        // The column's variable takes the row's place, and that of the row becomes zero.
        let mut pivot = match rows.get_mut(chosen) {
            Some(row) => std::mem::take(row),
            None => break,
        };
        let by = 1.0 / coefficient(&pivot);
        if let Some(own) = pivot.get_mut(column) {
            *own = 1.0;
        }
        pivot.iter_mut().for_each(|value| *value *= by);
        let eliminate = |row: &mut [f64]| {
            let Some(factor) = row.get_mut(column).map(std::mem::take) else {
                return;
            };
            row.iter_mut()
                .zip(&pivot)
                .for_each(|(value, p)| *value -= factor * p);
        };
        rows.iter_mut().for_each(|row| eliminate(row));
        eliminate(&mut gain);
        if let (Some(row), Some(zero), Some(held)) =
            (rows.get_mut(chosen), zero.get_mut(column), holds.get_mut(chosen))
        {
            *row = pivot;
            std::mem::swap(zero, held);
        }
    }
    let mut x = vec![0.0; n];
    for (row, name) in rows.iter().zip(&holds) {
        if let (Some(x), Some(value)) = (x.get_mut(*name), row.last()) {
            *x = value.max(0.0);
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Gigabits a second at each rank.
    fn links(rates: &[f64]) -> Rates {
        Rates::new(rates.to_vec(), Vec::new())
    }

    #[test]
    fn equal_links_share_evenly_and_a_ring_stays() {
        let rates = links(&[1.0; 8]);
        for share in rates.best() {
            assert!((share - 0.125).abs() < 1e-9);
        }
        assert_eq!(rates.shares(), None);
    }

    #[test]
    fn a_slow_rank_owns_nothing_and_costs_its_own_bytes_only() {
        let rates = links(&[0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        let best = rates.best();
        assert_eq!(best[0], 0.0);
        assert!((rates.time(&best) - 1.0 / 0.1).abs() < 1e-9);
        assert!((rates.time_of_ring() / rates.time(&best) - 1.75).abs() < 1e-9);
        let shares = rates.shares().unwrap();
        assert_eq!((shares[0], shares.iter().sum::<u32>()), (0, WHOLE));
        // The others are equal, and each owns a seventh.
        assert!(
            shares[1..].iter().all(|s| s.abs_diff(WHOLE / 7) <= 1),
            "{shares:?}"
        );
    }

    #[test]
    fn a_slow_link_between_two_ranks_carries_nothing() {
        let rates = Rates::new(vec![1.0; 8], vec![(2, 5, 0.001)]);
        let best = rates.best();
        assert!(best[2] + best[5] < 0.002, "{best:?}");
        // The six others own all: 1 + 6/6 each.
        assert!((rates.time(&best) - 2.0).abs() < 0.01, "{}", rates.time(&best));
    }

    #[test]
    fn what_two_turns_have_seen_becomes_rates_and_a_pair_is_a_limit_only_if_it_was_one_in_both() {
        // Rank 0 carries 70, rank 1 and 2 carry 700; each fair among two.
        let seen = |own: [u64; 3], their: [u64; 3]| Seen {
            own_turn: own.to_vec(),
            their_turn: their.to_vec(),
        };
        let of = |slow: u64| {
            Rates::of(&[
                seen([0, 35, 35], [0, 70, 70]),
                seen([70, 0, slow], [35, 0, slow]),
                seen([70, 630, 0], [35, 630, 0]),
            ])
        };
        assert_eq!(of(630), links(&[70.0, 700.0, 700.0]));
        // Only from rank 2 to rank 1.
        assert_eq!(of(7), Rates::new(vec![70.0, 77.0, 77.0], vec![(1, 2, 7.0)]));
        let nothing = Rates::of(&vec![
            Seen {
                own_turn: vec![0; 3],
                their_turn: vec![0; 3],
            };
            3
        ]);
        assert!(nothing.best().iter().all(|x| x.is_finite()));
    }

    #[test]
    fn whatever_ranks_report_the_shares_make_a_whole() {
        let numbers = [0, 1, 1 << 32, u64::MAX];
        for case in 0..1usize << 12 {
            let number = |at: usize| numbers[case >> (2 * at) & 3];
            // Every rank has a turn of large numbers; what the others have seen in them varies.
            let seen = [0, 2, 4].map(|at| Seen {
                own_turn: vec![u64::MAX, number(at), number(at + 1)],
                their_turn: vec![number(at + 1), u64::MAX, number(at)],
            });
            let rates = Rates::of(&seen);
            let best = rates.best();
            assert!(best.iter().all(|x| (0.0..=1.0).contains(x)), "{case}: {best:?}");
            if let Some(shares) = rates.shares() {
                assert_eq!(shares.iter().sum::<u32>(), WHOLE, "{case}: {shares:?}");
            }
        }
    }

    /// The least time of any shares that are multiples of 1/`steps`.
    fn brute(rates: &Rates, shares: &mut Vec<f64>, left: usize, steps: usize) -> f64 {
        if shares.len() + 1 == rates.ranks.len() {
            shares.push(left as f64 / steps as f64);
            let time = rates.time(shares);
            shares.pop();
            return time;
        }
        (0..=left)
            .map(|own| {
                shares.push(own as f64 / steps as f64);
                let time = brute(rates, shares, left - own, steps);
                shares.pop();
                time
            })
            .fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn no_shares_on_a_grid_are_better(
            ranks in proptest::collection::vec(0.05f64..1.0, 3..=5),
            pairs in proptest::collection::vec((0usize..5, 1usize..5, 0.01f64..0.5), 0..=4),
        ) {
            let world = ranks.len();
            let mut limited = Vec::new();
            for (i, by, rate) in pairs {
                let (i, j) = (i % world, (i + by) % world);
                if i != j && !limited.iter().any(|(a, b, _)| (*a, *b) == (i.min(j), i.max(j))) {
                    limited.push((i.min(j), i.max(j), rate));
                }
            }
            let rates = Rates::new(ranks, limited);
            let best = rates.best();
            prop_assert!((best.iter().sum::<f64>() - 1.0).abs() < 1e-9);
            prop_assert!(best.iter().all(|x| (0.0..=1.0).contains(x)), "{best:?}");
            let found = brute(&rates, &mut Vec::new(), 20, 20);
            prop_assert!(rates.time(&best) <= found * (1.0 + 1e-6), "{best:?}: {} > {found}", rates.time(&best));
        }

        #[test]
        fn without_limits_of_pairs_the_time_is_the_bound_that_no_way_can_beat(
            ranks in proptest::collection::vec(0.05f64..1.0, 3..=16),
        ) {
            let (n, total) = (ranks.len() as f64, ranks.iter().sum::<f64>());
            let slowest = ranks.iter().copied().fold(f64::INFINITY, f64::min);
            let rates = links(&ranks);
            let best = rates.best();
            let bound = (2.0 * (n - 1.0) / total).max(1.0 / slowest);
            let time = rates.time(&best);
            prop_assert!((time / bound - 1.0).abs() < 1e-9, "{best:?}: {time}, at the least {bound}");
            if let Some(shares) = rates.shares() {
                prop_assert_eq!(shares.iter().sum::<u32>(), WHOLE);
            }
        }
    }
}
