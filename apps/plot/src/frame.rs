//! What every plot has around its data: texts, lines, axes with their ticks.

use super::scene::{Anchor, Colour, Shape};
use super::{GRID, SOFT_INK};

/// The size of small letters: labels of ticks, and the legend.
pub const SMALL: f32 = 12.0;

impl Shape {
    /// A text that reads from left to right.
    pub fn text(at: (f32, f32), anchor: Anchor, size: f32, fill: Colour, text: impl Into<String>) -> Self {
        Self::Text {
            at,
            anchor,
            size,
            fill,
            upwards: false,
            text: text.into(),
        }
    }

    /// A solid line.
    pub fn line(points: Vec<(f32, f32)>, stroke: Colour, width: f32) -> Self {
        Self::Line {
            points,
            stroke,
            width,
            dash: None,
        }
    }

    /// The same shape; a line with dashes and gaps of these lengths.
    #[must_use]
    pub fn dashed(mut self, lengths: [f32; 2]) -> Self {
        if let Self::Line { dash, .. } = &mut self {
            *dash = Some(lengths);
        }
        self
    }
}

/// The area of a plot in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    /// Of the vertical axis.
    pub left: f32,
    /// Where horizontal lines end.
    pub right: f32,
    /// Where the vertical axis ends.
    pub top: f32,
    /// Of the horizontal axis.
    pub bottom: f32,
}

impl Frame {
    /// A line across and a label on the left for each tick of the vertical axis, height and label.
    pub fn rows(self, ticks: impl IntoIterator<Item = (f32, String)>) -> impl Iterator<Item = Shape> {
        ticks.into_iter().flat_map(move |(y, label)| {
            [
                Shape::line(vec![(self.left, y), (self.right, y)], GRID, 1.0),
                Shape::text((self.left - 8.0, y + 4.0), Anchor::End, SMALL, SOFT_INK, label),
            ]
        })
    }

    /// A mark and, where there is one, a label below it for each tick of the horizontal axis.
    pub fn columns(
        self,
        ticks: impl IntoIterator<Item = (f32, Option<String>)>,
    ) -> impl Iterator<Item = Shape> {
        ticks.into_iter().flat_map(move |(x, label)| {
            let mark = vec![(x, self.bottom), (x, self.bottom + 5.0)];
            let place = (x, self.bottom + 19.0);
            let label = label.map(|label| Shape::text(place, Anchor::Middle, SMALL, SOFT_INK, label));
            [Some(Shape::line(mark, SOFT_INK, 1.0)), label]
                .into_iter()
                .flatten()
        })
    }

    /// Both axes.
    pub fn axes(self) -> Shape {
        let corner = vec![
            (self.left, self.top),
            (self.left, self.bottom),
            (self.right, self.bottom),
        ];
        Shape::line(corner, SOFT_INK, 1.2)
    }
}
