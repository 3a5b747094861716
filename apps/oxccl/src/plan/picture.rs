//! The picture of `oxccl plan --svg`: what each method leaves of the devices' time, over the rate of the links.

use fleet::{Job, Links, Rate};
use oxccl::core::Result;
use oxccl_plot::{Anchor, Axis, CURVES, Frame, INK, LogAxis, SMALL, SOFT_INK, Scene, Shape};

const WIDTH: f32 = 820.0;
const FRAME: Frame = Frame {
    left: 66.0,
    right: 790.0,
    top: 120.0,
    bottom: 480.0,
};
/// The rates drawn are those given times 10 to the power of -2 to 2, in so many steps.
const STEPS: i32 = 16;

/// The methods of `job`. Errors: those of the plan.
pub(super) fn of(links: &Links, job: &Job) -> Result<Scene> {
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
    Ok(scene(&curves, job.target))
}

fn scene(curves: &[(String, Vec<(f64, f64)>)], target: f64) -> Scene {
    let rates = || {
        curves
            .iter()
            .flat_map(|(_, points)| points.iter().map(|(rate, _)| *rate))
    };
    let (low, high) = rates().fold((f64::INFINITY, 0.0f64), |(a, b), r| (a.min(r), b.max(r)));
    let Frame {
        left,
        right,
        top,
        bottom,
    } = FRAME;
    let x = LogAxis::new(low, high, left, right);
    let y = Axis::new(0.0, 1.0, bottom, top, 5);
    let title = "What is left of the devices' time";
    let mut shapes = vec![Shape::text((left, 32.0), Anchor::Start, 20.0, INK, title)];
    let rows = y.ticks().into_iter();
    shapes.extend(FRAME.rows(rows.map(|t| (y.pixel(t), format!("{:.0} %", 100.0 * t)))));
    let rate = |t| Rate::new(t).map(|r| r.to_string()).unwrap_or_default();
    let columns = x.ticks().into_iter();
    shapes.extend(FRAME.columns(columns.map(|t| (x.pixel(t), Some(rate(t))))));
    let wanted = vec![(left, y.pixel(target)), (right, y.pixel(target))];
    shapes.push(Shape::line(wanted, SOFT_INK, 1.2).dashed([6.0, 4.0]));
    shapes.push(FRAME.axes());
    for (n, (name, points)) in curves.iter().enumerate() {
        let colour = CURVES.get(n % CURVES.len()).copied().unwrap_or(INK);
        // After all colours once more, dashed.
        let line = |points, width| match Shape::line(points, colour, width) {
            line if n < CURVES.len() => line,
            line => line.dashed([3.0, 3.0]),
        };
        let (column, row) = ((n % 4) as f32, (n / 4) as f32);
        let (at, base) = (left + column * 182.0, 58.0 + row * 18.0);
        shapes.push(line(vec![(at, base - 4.0), (at + 24.0, base - 4.0)], 2.5));
        shapes.push(Shape::text(
            (at + 30.0, base),
            Anchor::Start,
            SMALL,
            INK,
            name.clone(),
        ));
        let points = points
            .iter()
            .map(|(rate, share)| (x.pixel(*rate), y.pixel(*share)));
        shapes.push(line(points.collect(), 2.0));
    }
    let below = bottom + 44.0;
    let label = "rate between hosts; dashed across: the target";
    let middle = ((left + right) / 2.0, below);
    shapes.push(Shape::text(middle, Anchor::Middle, 13.0, INK, label));
    Scene {
        width: WIDTH,
        height: below + 16.0,
        description: format!("{title}, method by method, over the rate of the links"),
        shapes,
    }
}
