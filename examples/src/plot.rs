//! The loss curve of a run: one line per replica over time, with kills, stalls and recoveries marked.
//!
//! Data flows events → [`Picture`] (what is to be seen, in seconds and loss) → [`Scene`] (shapes in pixels) → SVG and PNG.
//! Labels of marks that lie close together are put in rows above the plot, so that they never overlap.

use std::collections::BTreeMap;
use std::path::Path;

use ftcore::{Error, Result};
use oxccl::launch::EventKind;
use oxccl_launch::SupervisorEvent;

use crate::report::{Report, thousands};

mod font;
mod labels;
mod png;

pub use font::Font;
pub use oxccl_plot::{Anchor, Axis, Colour, Scene, Shape, to_svg};
pub use png::to_png;

use labels::label_places;
use oxccl_plot::{CURVES, Frame, INK, SMALL, SOFT_INK};

/// The losses of one replica.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub label: String,
    /// Unbroken stretches (one per incarnation) of (seconds since the start, loss), in order of time.
    pub parts: Vec<Vec<(f64, f64)>>,
}

/// What a vertical mark stands for; gives its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkKind {
    /// A process died.
    Death,
    /// A process was started again.
    Restart,
    /// A replica is back: it healed, or it committed for the first time in its new incarnation.
    Recovery,
}

/// A moment worth a label.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Seconds since the start.
    pub at_s: f64,
    /// What it is.
    pub kind: MarkKind,
    /// What is written at it.
    pub label: String,
}

/// What is to be seen.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// The heading.
    pub title: String,
    /// One line below it, with the figures that matter.
    pub subtitle: String,
    /// The curves, by replica.
    pub series: Vec<Series>,
    /// Loss on held-out data at the end, drawn as a disc at (seconds, loss).
    pub held_out: Option<(f64, f64)>,
    /// Shaded spans of time (from, to) in seconds.
    pub stalls: Vec<(f64, f64)>,
    /// The moments.
    pub marks: Vec<Mark>,
}

const WIDTH: f32 = 1000.0;
const PLOT_HEIGHT: f32 = 380.0;
const LEFT: f32 = 68.0;
const RIGHT: f32 = 30.0;
const HEADER: f32 = 92.0;
const ROW: f32 = 17.0;
const FOOTER: f32 = 54.0;
/// Text in an SVG is set in whatever typeface the reader has; it may be wider than ours.
const SLACK: f32 = 1.15;

const STALL: Colour = Colour::hex(0xdc_26_26).with_alpha(38);

impl MarkKind {
    fn colour(self) -> Colour {
        match self {
            Self::Death => Colour::hex(0xdc_26_26),
            Self::Restart => Colour::hex(0xb4_53_09),
            Self::Recovery => Colour::hex(0x15_80_3d),
        }
    }
}

impl Picture {
    /// The picture of a run from everything that its supervisor saw, with the figures of its report.
    pub fn from_run(events: &[SupervisorEvent], report: &Report) -> Self {
        let start = report.started_us;
        let seconds = |t_us: u64| t_us.saturating_sub(start) as f64 / 1e6;
        let mut curves: BTreeMap<u32, BTreeMap<u32, Vec<(f64, f64)>>> = BTreeMap::new();
        for event in events {
            if let SupervisorEvent::Replica(e) = event
                && let EventKind::Step { loss, .. } = e.kind
            {
                curves
                    .entry(e.replica)
                    .or_default()
                    .entry(e.incarnation)
                    .or_default()
                    .push((seconds(e.t_us), loss));
            }
        }
        let series = curves
            .into_iter()
            .map(|(replica, incarnations)| Series {
                label: format!("replica {replica}"),
                parts: incarnations.into_values().collect(),
            })
            .collect();
        let mut marks = Vec::new();
        for death in &report.deaths {
            let r = death.replica;
            marks.push(Mark {
                at_s: seconds(death.t_us),
                kind: MarkKind::Death,
                label: format!("replica {r} killed ({})", death.exit),
            });
            if let Some(t) = death.restarted_us {
                marks.push(Mark {
                    at_s: seconds(t),
                    kind: MarkKind::Restart,
                    label: format!("replica {r} restarted"),
                });
            }
            if let (Some(t), Some(ms)) = (death.first_commit_us, death.restart_to_commit_ms) {
                let label = format!("replica {r} healed, first commit after {:.1} s", ms / 1e3);
                marks.push(Mark {
                    at_s: seconds(t),
                    kind: MarkKind::Recovery,
                    label,
                });
            }
        }
        let mut stalls: Vec<(f64, f64)> = report
            .deaths
            .iter()
            // The part of the gap in which a replica was missing; before it the survivors computed.
            .filter_map(|d| {
                d.stall
                    .as_ref()
                    .map(|s| (seconds(s.from_us.max(d.t_us)), seconds(s.to_us)))
            })
            .collect();
        stalls.dedup();
        let mut subtitle = vec![format!(
            "{} replicas, {} parameters, {} s",
            report.replicas,
            thousands(report.parameters),
            report.wall_s.round()
        )];
        if let Some(loss) = report.heldout_loss {
            subtitle.push(format!("held-out loss {loss:.3}"));
        }
        if let Some(stall) = &report.longest_stall {
            subtitle.push(format!("longest stall of a survivor {:.0} ms", stall.stall_ms));
        }
        Self {
            title: format!("{}: training loss", report.program),
            subtitle: subtitle.join("  ·  "),
            series,
            held_out: report.heldout_loss.map(|loss| (report.wall_s, loss)),
            stalls,
            marks,
        }
    }

    /// The layout in pixels.
    pub fn to_scene(&self, font: &Font) -> Scene {
        let finite = |p: &(f64, f64)| p.0.is_finite() && p.1.is_finite();
        let points: Vec<(f64, f64)> = self
            .series
            .iter()
            .flat_map(|s| s.parts.iter().flatten())
            .chain(&self.held_out)
            .copied()
            .filter(finite)
            .collect();
        let x_end = points
            .iter()
            .map(|p| p.0)
            .chain(self.marks.iter().map(|m| m.at_s))
            .fold(1.0, f64::max);
        let low = points.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
        let high = points.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let pad = ((high - low) * 0.05).max(1e-3);
        let x_axis = Axis::new(0.0, x_end * 1.01, LEFT, WIDTH - RIGHT, 10);
        let places = label_places(&self.marks, &x_axis, font);
        let row_count = places
            .iter()
            .flatten()
            .map(|place| place.row + 1)
            .max()
            .unwrap_or(0);
        let top = HEADER + row_count as f32 * ROW + if row_count > 0 { 6.0 } else { 0.0 };
        let bottom = top + PLOT_HEIGHT;
        let y_axis = Axis::new(low - pad, high + pad, bottom, top, 7);

        let mut shapes = Vec::new();
        shapes.push(Shape::text((LEFT, 32.0), Anchor::Start, 20.0, INK, &self.title));
        shapes.push(Shape::text(
            (LEFT, 53.0),
            Anchor::Start,
            13.0,
            SOFT_INK,
            &self.subtitle,
        ));
        self.legend(font, &mut shapes);

        let frame = Frame {
            left: LEFT,
            right: WIDTH - RIGHT,
            top,
            bottom,
        };
        let rows = y_axis.ticks().into_iter();
        shapes.extend(frame.rows(rows.map(|t| (y_axis.pixel(t), y_axis.label(t)))));
        let columns = x_axis.ticks().into_iter();
        shapes.extend(frame.columns(columns.map(|t| (x_axis.pixel(t), Some(x_axis.label(t))))));
        let middle = ((LEFT + WIDTH - RIGHT) / 2.0, bottom + 40.0);
        let caption = "seconds since the start";
        shapes.push(Shape::text(middle, Anchor::Middle, 13.0, INK, caption));
        shapes.push(Shape::Text {
            at: (20.0, (top + bottom) / 2.0),
            anchor: Anchor::Middle,
            size: 13.0,
            fill: INK,
            upwards: true,
            text: "loss (nats)".into(),
        });

        for &(from, to) in &self.stalls {
            let (x0, x1) = (x_axis.pixel(from), x_axis.pixel(to));
            // A stall of some milliseconds would be thinner than a pixel.
            let width = (x1 - x0).max(2.0);
            shapes.push(Shape::Rect {
                area: [x0, top, width, bottom - top],
                fill: STALL,
            });
        }
        for (series, &colour) in self.series.iter().zip(CURVES.iter().cycle()) {
            for part in &series.parts {
                let part: Vec<(f64, f64)> = part.iter().copied().filter(finite).collect();
                let pixels = |points: &[(f64, f64)]| -> Vec<(f32, f32)> {
                    points
                        .iter()
                        .map(|p| (x_axis.pixel(p.0), y_axis.pixel(p.1)))
                        .collect()
                };
                let raw = thinned(&part);
                match smoothed(&part) {
                    Some(smooth) => {
                        shapes.push(Shape::line(pixels(&raw), colour.with_alpha(64), 1.0));
                        shapes.push(Shape::line(pixels(&thinned(&smooth)), colour, 2.0));
                    }
                    None => shapes.push(Shape::line(pixels(&raw), colour, 1.6)),
                }
            }
        }
        for (mark, place) in self.marks.iter().zip(&places) {
            let (x, colour) = (x_axis.pixel(mark.at_s), mark.kind.colour());
            let base = |row: usize| top - 6.0 - row as f32 * ROW;
            let line_top = place.map_or(top, |place| base(place.row) - 10.0);
            let upright = vec![(x, line_top), (x, bottom)];
            shapes.push(Shape::line(upright, colour, 1.2).dashed([4.0, 3.0]));
            if let Some(place) = place {
                let (anchor, dx) = if place.leftwards {
                    (Anchor::End, -5.0)
                } else {
                    (Anchor::Start, 5.0)
                };
                let at = (x + dx, base(place.row));
                shapes.push(Shape::text(at, anchor, SMALL, colour, &mark.label));
            }
        }
        shapes.push(frame.axes());
        if let Some((x, y)) = self.held_out.filter(finite) {
            let centre = (x_axis.pixel(x), y_axis.pixel(y));
            shapes.push(Shape::Disc {
                centre,
                radius: 6.0,
                fill: INK,
            });
            // Above the disc and ending at it: the curves come from the left and lie mostly below.
            let at = (centre.0 + 6.0, centre.1 - 12.0);
            shapes.push(Shape::text(
                at,
                Anchor::End,
                SMALL,
                INK,
                format!("held-out {y:.3}"),
            ));
        }
        Scene {
            width: WIDTH,
            height: bottom + FOOTER,
            description: format!("{}. {}", self.title, self.subtitle),
            shapes,
        }
    }

    /// One line: a sample of each curve, the held-out disc and the shaded stall.
    fn legend(&self, font: &Font, shapes: &mut Vec<Shape>) {
        let mut x = LEFT;
        let y = 77.0;
        let mut entry = |sample: &dyn Fn(f32) -> Shape, label: &str| {
            shapes.push(sample(x));
            shapes.push(Shape::text((x + 30.0, y), Anchor::Start, SMALL, INK, label));
            x += 30.0 + font.width(label, SMALL) * SLACK + 22.0;
        };
        for (series, &colour) in self.series.iter().zip(CURVES.iter().cycle()).take(CURVES.len()) {
            entry(
                &|x| Shape::line(vec![(x, y - 4.0), (x + 24.0, y - 4.0)], colour, 2.5),
                &series.label,
            );
        }
        if self.held_out.is_some() {
            let disc = |x| Shape::Disc {
                centre: (x + 14.0, y - 4.0),
                radius: 6.0,
                fill: INK,
            };
            entry(&disc, "held-out loss at the end");
        }
        if !self.stalls.is_empty() {
            let shade = |x| Shape::Rect {
                area: [x + 4.0, y - 11.0, 20.0, 14.0],
                fill: STALL,
            };
            entry(&shade, "survivors wait");
        }
    }

    /// Writes `STEM.svg` and `STEM.png` into `folder` and returns their paths. Fails with `Io` naming the file.
    pub fn write(&self, folder: &Path, stem: &str) -> Result<[std::path::PathBuf; 2]> {
        let font = Font::load()?;
        let scene = self.to_scene(&font);
        let paths = [
            folder.join(format!("{stem}.svg")),
            folder.join(format!("{stem}.png")),
        ];
        let [svg, png] = &paths;
        std::fs::write(svg, to_svg(&scene)).map_err(|e| Error::io(format!("write {}", svg.display()), e))?;
        std::fs::write(png, to_png(&scene, &font)?)
            .map_err(|e| Error::io(format!("write {}", png.display()), e))?;
        Ok(paths)
    }
}

/// A centred moving average over about a sixtieth of the points; `None` if there are too few for it to mean anything.
fn smoothed(points: &[(f64, f64)]) -> Option<Vec<(f64, f64)>> {
    if points.len() < 60 {
        return None;
    }
    let half = (points.len() / 120).max(2);
    let mean = |i: usize| {
        // Symmetric at the ends too, where the curve is steep: otherwise it would be pulled away from its first points.
        let reach = half.min(i).min(points.len() - 1 - i);
        let window = points.get(i - reach..=i + reach).unwrap_or_default();
        window.iter().map(|p| p.1).sum::<f64>() / window.len().max(1) as f64
    };
    Some(points.iter().enumerate().map(|(i, p)| (p.0, mean(i))).collect())
}

/// At most about two thousand points: of each stretch its lowest and its highest, in order, so that no peak is lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    const STRETCHES: usize = 1000;
    if points.len() <= 2 * STRETCHES {
        return points.to_vec();
    }
    let mut out = Vec::with_capacity(2 * STRETCHES + 2);
    for stretch in points.chunks(points.len().div_ceil(STRETCHES)) {
        let low = stretch.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = stretch.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        if let (Some(low), Some(high)) = (low, high) {
            let (first, second) = if low.0 <= high.0 { (low, high) } else { (high, low) };
            out.push(*first);
            if first != second {
                out.push(*second);
            }
        }
    }
    out
}

#[cfg(test)]
#[path = "plot/tests.rs"]
mod tests;
