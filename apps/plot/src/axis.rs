//! Axes: from values to pixels, and where the ticks are.

/// A linear scale with round ticks.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    from: f32,
    to: f32,
    step: f64,
}

impl Axis {
    /// Values `low` to `high` on pixels `from` to `to`, with about `ticks` ticks.
    pub fn new(low: f64, high: f64, from: f32, to: f32, ticks: u32) -> Self {
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

    /// Where `value` is, in pixels.
    pub fn pixel(&self, value: f64) -> f32 {
        let part = (value - self.low) / (self.high - self.low);
        self.from + (self.to - self.from) * part as f32
    }

    /// The round values on the axis; 100 at most.
    pub fn ticks(&self) -> Vec<f64> {
        let first = (self.low / self.step).ceil() as i64;
        let last = (self.high / self.step).floor() as i64;
        (first..=last).take(100).map(|i| i as f64 * self.step).collect()
    }

    /// A tick's value in as many digits as the ticks need.
    pub fn label(&self, value: f64) -> String {
        let decimals = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        // "-0" is no number for people.
        let value = if value.abs() < self.step / 2.0 { 0.0 } else { value };
        format!("{value:.decimals$}")
    }
}

/// A logarithmic scale of positive values, with ticks at powers of ten and, where these are few, at 2 and 5 times them.
#[derive(Debug, Clone, PartialEq)]
pub struct LogAxis {
    exponents: Axis,
}

impl LogAxis {
    /// Values `low` to `high`, both positive, on pixels `from` to `to`. What is not positive counts as 1; one value alone gets a decade.
    pub fn new(low: f64, high: f64, from: f32, to: f32) -> Self {
        let exponent = |v: f64| if v > 0.0 && v.is_finite() { v.log10() } else { 0.0 };
        let (low, high) = (exponent(low), exponent(high));
        let (low, high) = if high > low {
            (low, high)
        } else {
            (low - 0.5, low + 0.5)
        };
        Self {
            exponents: Axis::new(low, high, from, to, 10),
        }
    }

    /// Where `value` is, in pixels; the lower end for what is not positive.
    pub fn pixel(&self, value: f64) -> f32 {
        let low = self.exponents.low;
        self.exponents
            .pixel(if value > 0.0 { value.log10() } else { low })
    }

    /// Powers of ten on the axis; with 2 and 5 times them if there are fewer than three, and with more where that is still so.
    pub fn ticks(&self) -> Vec<f64> {
        const TENTHS: [&[u8]; 3] = [&[10], &[10, 20, 50], &[10, 20, 30, 40, 50, 60, 70, 80, 90]];
        let steps = TENTHS.iter().map(|tenths| self.ticks_at(tenths));
        let fine: Vec<u8> = (10..100).step_by(2).collect();
        let enough = |ticks: &Vec<f64>| ticks.len() > 2;
        steps
            .into_iter()
            .find(enough)
            .unwrap_or_else(|| self.ticks_at(&fine))
    }

    /// These tenths of powers of ten, where they are on the axis.
    fn ticks_at(&self, tenths: &[u8]) -> Vec<f64> {
        let (low, high) = (self.exponents.low, self.exponents.high);
        let decades = low.floor().max(-30.0) as i32..=high.ceil().min(30.0) as i32;
        // Divided, not multiplied by a fraction: 3 / 10 is written 0.3.
        let times = |tenths: f64, power: i32| match power {
            0.. => tenths * 10f64.powi(power),
            _ => tenths / 10f64.powi(-power),
        };
        decades
            .flat_map(|d| tenths.iter().map(move |t| times(f64::from(*t), d - 1)))
            .filter(|t| (low - 1e-9..=high + 1e-9).contains(&t.log10()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_has_ticks_at_powers_of_ten_and_between_them_where_these_are_few() {
        let wide = LogAxis::new(0.3, 4000.0, 0.0, 100.0);
        assert_eq!(wide.ticks(), [1.0, 10.0, 100.0, 1000.0]);
        // Nearly three decades, of which two powers of ten are on the axis.
        let unlucky = LogAxis::new(11.0, 9000.0, 0.0, 100.0);
        assert_eq!(
            unlucky.ticks(),
            [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0]
        );
        for (low, high) in [(0.25, 0.45), (110.0, 190.0), (30.0, 90.0)] {
            let ticks = LogAxis::new(low, high, 0.0, 100.0).ticks();
            assert!((3..=10).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            assert!(ticks.iter().all(|t| format!("{t}").len() <= 4), "{ticks:?}");
        }
        let narrow = LogAxis::new(1.0, 40.0, 100.0, 0.0);
        assert_eq!(narrow.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!((narrow.pixel(1.0), narrow.pixel(40.0)), (100.0, 0.0));
        assert_eq!(narrow.pixel(0.0), 100.0);
        for (low, high) in [(5.0, 5.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            let odd = LogAxis::new(low, high, 0.0, 100.0);
            assert!(
                odd.pixel(5.0).is_finite() && odd.ticks().len() <= 10,
                "{low} {high}"
            );
        }
    }

    #[test]
    fn a_linear_axis_has_round_ticks() {
        let axis = Axis::new(0.0, 0.9, 0.0, 90.0, 5);
        let labels: Vec<_> = axis.ticks().into_iter().map(|t| axis.label(t)).collect();
        assert_eq!(labels, ["0.0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(axis.pixel(0.45), 45.0);
    }
}
