//! The figures of a benchmark as a picture: time and bus bandwidth over the size, a line per operation.

use oxccl_plot::{Anchor, Axis, CURVES, Colour, Frame, INK, LogAxis, SMALL, SOFT_INK, Scene, Shape};

use super::table::Line;

const WIDTH: f32 = 1080.0;
const PANEL: f32 = 440.0;
const HEIGHT: f32 = 360.0;
const LEFT: f32 = 66.0;
const GAP: f32 = 84.0;
/// Between the spans of two operations of one size.
const BESIDE: f32 = 4.0;
/// Width of a letter in parts of its size, about: the reader's typeface is not known here.
const LETTER: f32 = 0.58;

/// One operation's lines, by size; those without a size (a barrier) are not drawn.
fn series(lines: &[Line]) -> Vec<(&'static str, Vec<&Line>)> {
    let mut all: Vec<(&'static str, Vec<&Line>)> = Vec::new();
    for line in lines.iter().filter(|l| l.bytes > 0) {
        match all.iter_mut().find(|(op, _)| *op == line.op) {
            Some((_, of)) => of.push(line),
            None => all.push((line.op, vec![line])),
        }
    }
    for (_, of) in &mut all {
        of.sort_by_key(|l| l.bytes);
    }
    all
}

/// A size in words: 4 B, 64 KiB, 1 MiB.
fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value.fract() > 0.05);
    format!("{value:.digits$} {}", units.get(unit).copied().unwrap_or("B"))
}

/// One of the two plots: where it is, and how values become heights.
struct Panel<'a> {
    frame: Frame,
    name: &'a str,
    x: LogAxis,
    sizes: &'a [u64],
}

impl Panel<'_> {
    /// Everything but the data. `ticks` are heights and labels.
    fn draw(&self, ticks: impl Iterator<Item = (f32, String)>, shapes: &mut Vec<Shape>) {
        let place = (self.frame.left, self.frame.top - 12.0);
        shapes.push(Shape::text(place, Anchor::Start, 13.0, INK, self.name));
        shapes.extend(self.frame.rows(ticks));
        let mut free = f32::NEG_INFINITY;
        let columns = self.sizes.iter().map(|&bytes| {
            let (at, label) = (self.x.pixel(bytes as f64), size(bytes as f64));
            let half = label.chars().count() as f32 * SMALL * LETTER / 2.0;
            // Labels that would touch the one before are left out; their ticks stay.
            let fits = at - half > free;
            if fits {
                free = at + half + 6.0;
            }
            (at, fits.then_some(label))
        });
        shapes.extend(self.frame.columns(columns));
        shapes.push(self.frame.axes());
    }

    /// The line and its points, `beside` pixels to the right.
    fn curve(
        &self,
        of: &[&Line],
        colour: Colour,
        beside: f32,
        height: impl Fn(&Line) -> f32,
        shapes: &mut Vec<Shape>,
    ) {
        let points: Vec<_> = of
            .iter()
            .map(|l| (self.x.pixel(l.bytes as f64) + beside, height(l)))
            .collect();
        if points.len() > 1 {
            shapes.push(Shape::line(points.clone(), colour, 2.0));
        }
        let disc = |centre| Shape::Disc {
            centre,
            radius: 3.5,
            fill: colour,
        };
        shapes.extend(points.into_iter().map(disc));
    }
}

/// The picture of `lines`.
pub(super) fn scene(title: &str, subtitle: &str, lines: &[Line]) -> Scene {
    let series = series(lines);
    let mut shapes = vec![
        Shape::text((LEFT, 32.0), Anchor::Start, 20.0, INK, title),
        Shape::text((LEFT, 53.0), Anchor::Start, 13.0, SOFT_INK, subtitle),
    ];
    let (mut x, mut y) = (LEFT, 78.0);
    for ((op, _), &colour) in series.iter().zip(CURVES.iter().cycle()) {
        let width = 30.0 + op.chars().count() as f32 * SMALL * LETTER + 22.0;
        if x + width > WIDTH {
            (x, y) = (LEFT, y + 18.0);
        }
        let sample = vec![(x, y - 4.0), (x + 24.0, y - 4.0)];
        shapes.push(Shape::line(sample, colour, 2.5));
        shapes.push(Shape::text((x + 30.0, y), Anchor::Start, SMALL, INK, *op));
        x += width;
    }
    let top = y + 40.0;
    let bottom = top + HEIGHT;
    let all = || series.iter().flat_map(|(_, of)| of.iter().copied());
    let mut sizes: Vec<u64> = all().map(|l| l.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let (least, most) = (
        sizes.first().copied().unwrap_or(1),
        sizes.last().copied().unwrap_or(1),
    );
    let panel = |left: f32, name| Panel {
        frame: Frame {
            left,
            right: left + PANEL,
            top,
            bottom,
        },
        name,
        // A little room, so that the first point does not lie on the axis.
        x: LogAxis::new(least as f64 / 1.3, most as f64 * 1.3, left, left + PANEL),
        sizes: &sizes,
    };

    let times = || all().flat_map(|l| [l.min_us, l.max_us]).filter(|t| *t > 0.0);
    let (low, high) = times().fold((f64::INFINITY, 0.0f64), |(a, b), t| (a.min(t), b.max(t)));
    let times = LogAxis::new(low / 1.2, high * 1.2, bottom, top);
    let latency = panel(LEFT, "time of a call, µs: median, least to greatest");
    let ticks = times
        .ticks()
        .into_iter()
        .map(|t| (times.pixel(t), format!("{t}")));
    latency.draw(ticks, &mut shapes);
    for (n, ((_, of), &colour)) in series.iter().zip(CURVES.iter().cycle()).enumerate() {
        // Beside each other, where several operations have one size.
        let beside = (n as f32 - (series.len() - 1) as f32 / 2.0) * BESIDE;
        for l in of {
            let x = latency.x.pixel(l.bytes as f64) + beside;
            let span = vec![(x, times.pixel(l.min_us)), (x, times.pixel(l.max_us))];
            shapes.push(Shape::line(span, colour.with_alpha(110), 1.2));
        }
        latency.curve(of, colour, beside, |l| times.pixel(l.time_us), &mut shapes);
    }

    let fastest = all()
        .map(|l| l.busbw)
        .filter(|b| b.is_finite())
        .fold(1e-3, f64::max);
    let speeds = Axis::new(0.0, fastest * 1.06, bottom, top, 7);
    let bandwidth = panel(LEFT + PANEL + GAP, "bus bandwidth, GB/s (10⁹ bytes)");
    let ticks = speeds
        .ticks()
        .into_iter()
        .map(|t| (speeds.pixel(t), speeds.label(t)));
    bandwidth.draw(ticks, &mut shapes);
    for ((_, of), &colour) in series.iter().zip(CURVES.iter().cycle()) {
        bandwidth.curve(of, colour, 0.0, |l| speeds.pixel(l.busbw), &mut shapes);
    }
    let below = bottom + 40.0;
    for left in [LEFT, LEFT + PANEL + GAP] {
        let middle = (left + PANEL / 2.0, below);
        let label = "size of the larger tensor of a rank";
        shapes.push(Shape::text(middle, Anchor::Middle, 13.0, INK, label));
    }
    Scene {
        width: WIDTH,
        height: below + 16.0,
        description: format!("{title}. {subtitle}"),
        shapes,
    }
}

#[cfg(test)]
mod tests {
    use oxccl_plot::to_svg;

    use super::*;

    fn line(op: &'static str, bytes: u64, time_us: f64, busbw: f64) -> Line {
        Line {
            op,
            bytes,
            warmup: 0,
            count: 1,
            time_us,
            min_us: time_us * 0.9,
            max_us: time_us * 3.0,
            algbw: busbw,
            busbw,
            of_implied: None,
            wrong: None,
        }
    }

    #[test]
    fn every_operation_has_a_curve_in_both_panels_and_its_name_once() {
        let lines = [
            line("all_reduce", 4, 1.5, 0.003),
            line("all_reduce", 1 << 20, 300.0, 3.5),
            line("broadcast", 1 << 20, 200.0, 5.2),
            line("barrier", 0, 0.8, 0.0),
        ];
        let s = scene("t", "s", &lines);
        let texts = || {
            s.shapes.iter().filter_map(|s| {
                if let Shape::Text { text, .. } = s {
                    Some(text)
                } else {
                    None
                }
            })
        };
        for name in ["all_reduce", "broadcast"] {
            assert_eq!(texts().filter(|t| *t == name).count(), 1, "{name}");
        }
        assert!(!texts().any(|t| t == "barrier"), "it has no size");
        assert_eq!(texts().filter(|t| *t == "1 MiB").count(), 2);
        let discs: Vec<_> = s
            .shapes
            .iter()
            .filter_map(|s| {
                if let Shape::Disc { centre, fill, .. } = s {
                    Some((*centre, *fill))
                } else {
                    None
                }
            })
            .collect();
        assert_eq!(discs.len(), 6);
        for ((x, y), _) in &discs {
            assert!(
                (LEFT..WIDTH).contains(x) && (0.0..s.height).contains(y),
                "{x} {y}"
            );
        }
        // The spans of two operations of one size do not cover each other.
        let spans: Vec<f32> = s
            .shapes
            .iter()
            .filter_map(|shape| match shape {
                Shape::Line { points, width, .. } if *width == 1.2 && points.len() == 2 => Some(points[0].0),
                _ => None,
            })
            .collect();
        assert_eq!(spans.len(), 3);
        assert!((spans[1] - spans[2]).abs() > 3.0, "{spans:?}");
        // In the first panel more time is higher, in the second more bandwidth.
        let heights =
            |colour: Colour| -> Vec<f32> { discs.iter().filter(|d| d.1 == colour).map(|d| d.0.1).collect() };
        let reduce = heights(CURVES[0]);
        assert!(reduce[1] < reduce[0] && reduce[3] < reduce[2], "{reduce:?}");
        let svg = to_svg(&s);
        assert!(svg.starts_with("<svg") && svg.contains("1 MiB") && !svg.contains("NaN"));
    }

    #[test]
    fn runs_without_sizes_or_with_odd_figures_are_drawn_too() {
        let odd = [
            line("all_reduce", 8, 0.0, f64::NAN),
            line("reduce", 8, 5.0, f64::INFINITY),
        ];
        for lines in [&[][..], &[line("barrier", 0, 1.0, 0.0)], &odd] {
            let svg = to_svg(&scene("t", "s", lines));
            assert!(svg.ends_with("</svg>\n"));
        }
    }

    #[test]
    fn sizes_are_in_words() {
        let words = [4.0, 1024.0, 1536.0, 65536.0, 16.0 * 1048576.0].map(size);
        assert_eq!(words, ["4 B", "1 KiB", "1.5 KiB", "64 KiB", "16 MiB"]);
    }
}
