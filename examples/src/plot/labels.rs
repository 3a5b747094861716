//! Where the labels of marks go: in rows above the plot, so that marks that lie close together stay readable.

use super::{Axis, Font, Mark, SLACK, SMALL, WIDTH};

/// More rows than this would leave no eye for the curve.
const MAX_ROWS: usize = 8;
/// Pixels between a label and the edge of the picture.
const MARGIN: f32 = 4.0;

/// Where the label of a mark goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LabelPlace {
    /// Counted upwards from the plot.
    pub(super) row: usize,
    /// The text ends at its line instead of starting there.
    pub(super) leftwards: bool,
}

/// Puts each label into the lowest row in which it touches no other label and its line crosses none. A label for which
/// there is no room (dozens of marks) has no place: its line is drawn without it.
pub(super) fn label_places(marks: &[Mark], x_axis: &Axis, font: &Font) -> Vec<Option<LabelPlace>> {
    let x_of = |i: usize| marks.get(i).map_or(0.0, |m| x_axis.pixel(m.at_s));
    let width = |i: usize| {
        marks
            .get(i)
            .map_or(0.0, |m| font.width(&m.label, SMALL) * SLACK + 10.0)
    };
    let mut rightmost_first: Vec<usize> = (0..marks.len()).collect();
    rightmost_first.sort_by(|a, b| x_of(*b).total_cmp(&x_of(*a)));
    // A label that would leave the picture ends at its line instead of starting there. So does every label that such a
    // one lies over: of two that point at each other, one's line always crosses the other's text.
    let mut leftwards: Vec<usize> = Vec::new();
    let mut rightwards: Vec<usize> = Vec::new();
    for i in rightmost_first {
        let (x, end) = (x_of(i), x_of(i) + width(i));
        let faces = |j: &usize| x_of(*j) < end && x_of(*j) - width(*j) < x;
        if end > WIDTH - MARGIN || leftwards.iter().any(faces) {
            leftwards.push(i)
        } else {
            rightwards.push(i)
        }
    }
    // In this order each line has to rise past labels only that lie on its other side.
    let order = rightwards
        .into_iter()
        .map(|i| (i, false))
        .chain(leftwards.into_iter().rev().map(|i| (i, true)));
    let mut rows: [Vec<(f32, f32)>; MAX_ROWS] = Default::default();
    let mut lines: Vec<(f32, usize)> = Vec::new();
    let mut places = vec![None; marks.len()];
    for (i, leftwards) in order {
        let (x, width) = (x_of(i), width(i));
        let (from, to) = if leftwards { (x - width, x) } else { (x, x + width) };
        // The text itself keeps 5 pixels from both ends of its span.
        let free = |row: &[(f32, f32)], a: f32, b: f32| row.iter().all(|(c, d)| b <= *c || a >= *d);
        let row = (0..MAX_ROWS).find(|&row| {
            rows.get(row).is_some_and(|r| free(r, from, to))
                && rows.iter().take(row).all(|r| free(r, x, x))
                && lines
                    .iter()
                    .all(|(other, top)| *top <= row || *other <= from || *other >= to)
        });
        let (Some(row), true) = (row, from >= MARGIN) else {
            continue;
        };
        if let (Some(taken), Some(place)) = (rows.get_mut(row), places.get_mut(i)) {
            taken.push((from, to));
            lines.push((x, row));
            *place = Some(LabelPlace { row, leftwards });
        }
    }
    places
}
