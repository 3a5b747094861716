//! The picture of `oxccl plan --svg`: what each method leaves of the devices' time, over the rate of the links.

use std::path::Path;

use fleet::{Job, Links, Rate};
use oxccl::core::{Error, Result};
use oxccl_plot::{Anchor, Axis, CURVES, Colour, GRID, INK, LogAxis, SOFT_INK, Scene, Shape, to_svg};

const WIDTH: f32 = 820.0;
const LEFT: f32 = 66.0;
const RIGHT: f32 = 790.0;
const TOP: f32 = 120.0;
const BOTTOM: f32 = 480.0;
const SMALL: f32 = 12.0;
/// The rates drawn are those given times 10 to the power of -2 to 2, in so many steps.
const STEPS: i32 = 16;

/// Checks before anything is computed that `path` can become a picture.
///
/// Errors: `InvalidArgument` for another ending than `.svg`, a folder, or a folder that does not exist.
pub(super) fn check(path: &Path) -> Result<()> {
    let named = |text: &str| Err(Error::invalid(format!("--svg {}: {text}", path.display())));
    if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg")) {
        return named("pictures are SVG; give the file the ending .svg");
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    if path.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
        return named("this is a folder, or it lies in none");
    }
    Ok(())
}

/// Draws the methods of `job` into `path`. Errors: those of the plan; `Io` naming the file.
pub(super) fn write(path: &Path, links: &Links, job: &Job) -> Result<()> {
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for step in 0..=STEPS {
        let by = 10f64.powf(-2.0 + 4.0 * f64::from(step) / f64::from(STEPS));
        let scaled = links.scaled(by)?;
        let last = scaled.hosts().len().saturating_sub(1);
        let rate = scaled.between(0, last).rate.bits_per_second();
        for e in fleet::plan(&scaled, job)?.estimates {
            let name = match e.sync_every {
                1 => format!("DDP, {}", e.format),
                h => format!("DiLoCo H={h}, {}", e.format),
            };
            let at = match curves.iter().position(|(n, _)| *n == name) {
                Some(at) => at,
                None => {
                    curves.push((name, Vec::new()));
                    curves.len() - 1
                }
            };
            let Some((_, points)) = curves.get_mut(at) else {
                continue;
            };
            // The best of each kind.
            match points.last_mut().filter(|(x, _)| *x == rate) {
                Some((_, y)) => *y = y.max(e.efficiency),
                None => points.push((rate, e.efficiency)),
            }
        }
    }
    let svg = to_svg(&scene(&curves, job.target));
    std::fs::write(path, svg).map_err(|e| Error::io(format!("write {}", path.display()), e))
}

fn text(at: (f32, f32), anchor: Anchor, size: f32, fill: Colour, text: impl Into<String>) -> Shape {
    Shape::Text {
        at,
        anchor,
        size,
        fill,
        upwards: false,
        text: text.into(),
    }
}

fn line(points: Vec<(f32, f32)>, stroke: Colour, width: f32, dash: Option<[f32; 2]>) -> Shape {
    Shape::Line {
        points,
        stroke,
        width,
        dash,
    }
}

fn scene(curves: &[(String, Vec<(f64, f64)>)], target: f64) -> Scene {
    let rates = || {
        curves
            .iter()
            .flat_map(|(_, points)| points.iter().map(|(rate, _)| *rate))
    };
    let (low, high) = rates().fold((f64::INFINITY, 0.0f64), |(a, b), r| (a.min(r), b.max(r)));
    let x = LogAxis::new(low, high, LEFT, RIGHT);
    let y = Axis::new(0.0, 1.0, BOTTOM, TOP, 5);
    let title = "What is left of the devices' time";
    let mut shapes = vec![text((LEFT, 32.0), Anchor::Start, 20.0, INK, title)];
    for tick in y.ticks() {
        let at = y.pixel(tick);
        shapes.push(line(vec![(LEFT, at), (RIGHT, at)], GRID, 1.0, None));
        let label = format!("{:.0} %", 100.0 * tick);
        shapes.push(text((LEFT - 8.0, at + 4.0), Anchor::End, SMALL, SOFT_INK, label));
    }
    for tick in x.ticks() {
        let at = x.pixel(tick);
        shapes.push(line(vec![(at, BOTTOM), (at, BOTTOM + 5.0)], SOFT_INK, 1.0, None));
        let label = Rate::new(tick).map(|r| r.to_string()).unwrap_or_default();
        shapes.push(text((at, BOTTOM + 19.0), Anchor::Middle, SMALL, SOFT_INK, label));
    }
    let wanted = y.pixel(target);
    shapes.push(line(
        vec![(LEFT, wanted), (RIGHT, wanted)],
        SOFT_INK,
        1.2,
        Some([6.0, 4.0]),
    ));
    shapes.push(line(
        vec![(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)],
        SOFT_INK,
        1.2,
        None,
    ));
    for (n, (name, points)) in curves.iter().enumerate() {
        let colour = CURVES.get(n % CURVES.len()).copied().unwrap_or(INK);
        // After all colours once more, dashed.
        let dash = (n >= CURVES.len()).then_some([3.0, 3.0]);
        let (column, row) = ((n % 4) as f32, (n / 4) as f32);
        let (at, base) = (LEFT + column * 182.0, 58.0 + row * 18.0);
        shapes.push(line(
            vec![(at, base - 4.0), (at + 24.0, base - 4.0)],
            colour,
            2.5,
            dash,
        ));
        shapes.push(text((at + 30.0, base), Anchor::Start, SMALL, INK, name.clone()));
        let points = points
            .iter()
            .map(|(rate, share)| (x.pixel(*rate), y.pixel(*share)));
        shapes.push(line(points.collect(), colour, 2.0, dash));
    }
    let below = BOTTOM + 44.0;
    let label = "rate between hosts; dashed across: the target";
    shapes.push(text(
        ((LEFT + RIGHT) / 2.0, below),
        Anchor::Middle,
        13.0,
        INK,
        label,
    ));
    Scene {
        width: WIDTH,
        height: below + 16.0,
        description: format!("{title}, method by method, over the rate of the links"),
        shapes,
    }
}
