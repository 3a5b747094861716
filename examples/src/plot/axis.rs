//! A linear axis: from values to pixels, and where its ticks are.

/// A linear scale with round ticks.
#[derive(Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    from: f32,
    to: f32,
    step: f64,
}

impl Axis {
    /// Values `low` to `high` on pixels `from` to `to`, with about `ticks` ticks.
    pub(super) fn new(low: f64, high: f64, from: f32, to: f32, ticks: u32) -> Self {
        let rough = (high - low) / f64::from(ticks);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|m| m * power)
            .into_iter()
            .find(|s| *s >= rough * 0.999);
        Self {
            low,
            high,
            from,
            to,
            step: step.unwrap_or(rough),
        }
    }

    pub(super) fn pixel(&self, value: f64) -> f32 {
        let part = (value - self.low) / (self.high - self.low);
        self.from + (self.to - self.from) * part as f32
    }

    pub(super) fn ticks(&self) -> Vec<f64> {
        let first = (self.low / self.step).ceil() as i64;
        let last = (self.high / self.step).floor() as i64;
        (first..=last).take(100).map(|i| i as f64 * self.step).collect()
    }

    pub(super) fn label(&self, value: f64) -> String {
        let decimals = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        // "-0" is no number for people.
        let value = if value.abs() < self.step / 2.0 { 0.0 } else { value };
        format!("{value:.decimals$}")
    }
}
