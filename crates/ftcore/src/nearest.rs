//! The name that was probably meant.

/// The candidate that is two changes at most away from `name`, or a third of its length; the first in order of those as near.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = (name.chars().count() / 3).max(2);
    let near = candidates.map(|c| (edit_distance(name, c), c)).min();
    near.filter(|(distance, _)| *distance <= most)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cb, cell) in b.iter().zip(row.iter_mut().skip(1)) {
            let above = *cell;
            let best = (diagonal + usize::from(ca != *cb)).min(above + 1).min(left + 1);
            diagonal = above;
            left = best;
            *cell = best;
        }
    }
    row.last()
        .copied()
        .unwrap_or(0)
        .max(usize::from(b.is_empty()) * a.chars().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_is_levenshtein() {
        for (a, b, d) in [
            ("", "", 0),
            ("abc", "", 3),
            ("", "ab", 2),
            ("nccl", "xccl", 1),
            ("gloo", "goo", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(edit_distance(a, b), d, "{a} {b}");
        }
    }
}
