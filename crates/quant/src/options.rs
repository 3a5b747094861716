//! What a caller chooses about a quantised group, and what `auto` means.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use ftcore::{Device, Error, Result};

use crate::{Codec, Rounding};

/// The format, or the choice of it by device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CodecChoice {
    /// [`Codec::MxE4M3`] on devices that compute in FP8 ([`supports_native_fp8`]), [`Codec::Int8B64`] elsewhere. A group whose ranks come
    /// to different answers fails at `configure` (L12).
    #[default]
    Auto,
    /// This one.
    Exactly(Codec),
}

impl CodecChoice {
    /// The format for `device`.
    pub fn on(self, device: &Device) -> Codec {
        match self {
            Self::Exactly(codec) => codec,
            Self::Auto if supports_native_fp8(device) => Codec::MxE4M3,
            Self::Auto => Codec::Int8B64,
        }
    }
}

impl From<Codec> for CodecChoice {
    fn from(codec: Codec) -> Self {
        Self::Exactly(codec)
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Exactly(codec) => codec.fmt(f),
        }
    }
}

impl FromStr for CodecChoice {
    type Err = Error;

    /// `auto`, or what [`Codec`] reads.
    fn from_str(s: &str) -> Result<Self> {
        if s == "auto" {
            return Ok(Self::Auto);
        }
        s.parse().map(Self::Exactly)
    }
}

/// True if `device` computes in FP8 by itself. An unregistered device kind does not.
pub fn supports_native_fp8(device: &Device) -> bool {
    ftcore::accelerator(&device.kind).is_ok_and(|a| a.native_fp8(device.index))
}

/// How often values are rounded on their way through an all-reduce of three ranks and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Accuracy {
    /// Twice (two-phase): about 2 × (n − 1) / n times the encoded size leaves each rank, whatever the number n of ranks.
    #[default]
    Economic,
    /// Once, everywhere: half the squared error, and n − 1 times the encoded size leaves each rank.
    Best,
}

/// What happens to floats in `all_gather` and `broadcast`, which change nothing by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Moves {
    /// They arrive bit for bit: parameters and snapshots are not the caller's to lose.
    #[default]
    Exact,
    /// f32, f16 and bf16 travel quantised. All ranks, the sender too, end with the same decoded bits.
    Quantized,
}

/// How a [`QuantizedGroup`](crate::QuantizedGroup) works.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizeOptions {
    /// The format. All ranks must come to the same.
    pub codec: CodecChoice,
    /// How values are rounded. The key of stochastic rounding is a seed here: every call, rank and phase gets a key of its own out of it, the
    /// round (see [`QuantizedGroup::start_round`](crate::QuantizedGroup::start_round)) and the call's number in the round.
    pub rounding: Rounding,
    /// Keeps what rounding loses in reductions and adds it the next time; see [`ErrorFeedback`](crate::ErrorFeedback).
    pub error_feedback: bool,
    /// How often values are rounded in an all-reduce. The same on all ranks.
    pub accuracy: Accuracy,
    /// Whether floats that are only moved are quantised too. The same on all ranks.
    pub moves: Moves,
    /// The time-out of calls that name no deadline.
    pub timeout: Duration,
}

impl Default for QuantizeOptions {
    fn default() -> Self {
        Self {
            codec: CodecChoice::Auto,
            rounding: Rounding::Nearest,
            error_feedback: false,
            accuracy: Accuracy::Economic,
            moves: Moves::Exact,
            timeout: Duration::from_secs(60),
        }
    }
}

impl QuantizeOptions {
    /// Errors: `InvalidArgument` if `codec` cannot be used like this.
    pub(crate) fn check(&self, codec: Codec) -> Result<()> {
        if codec == Codec::Int2B64 && !self.error_feedback {
            return Err(Error::invalid(
                "2 bits lose a fifth of the values' energy in every reduction and are for error feedback only: \
                 set QuantizeOptions::error_feedback, or take another format",
            ));
        }
        if codec == Codec::Int2B64 && self.moves == Moves::Quantized {
            return Err(Error::invalid(
                "2 bits are for reductions with error feedback; what is only moved has none: use Moves::Exact",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use ftcore::{Accelerator, DType, DeviceKind, Stream, Tensor};

    #[test]
    fn auto_is_int8_where_fp8_is_not_native() {
        assert!(!supports_native_fp8(&Device::CPU));
        assert!(!supports_native_fp8(&Device::new(DeviceKind::Hpu, 3)));
        assert_eq!(CodecChoice::Auto.on(&Device::CPU), Codec::Int8B64);
        assert_eq!("auto".parse::<CodecChoice>().unwrap(), CodecChoice::Auto);
        assert_eq!(
            "fp8".parse::<CodecChoice>().unwrap().on(&Device::CPU),
            Codec::MxE4M3
        );
        assert!("automatic".parse::<CodecChoice>().is_err());
    }

    /// A kind of device of which number 1 computes in FP8 and number 0 does not.
    struct Mixed;

    fn nothing<T>() -> Result<T> {
        Err(Error::unsupported("it only answers what it computes in"))
    }

    impl Accelerator for Mixed {
        fn kind(&self) -> DeviceKind {
            DeviceKind::Named("mixed-fp8".into())
        }
        fn count(&self) -> u32 {
            2
        }
        fn current(&self) -> Result<u32> {
            nothing()
        }
        fn set(&self, _: u32) -> Result<()> {
            nothing()
        }
        fn current_stream(&self, _: u32) -> Result<Arc<dyn Stream>> {
            nothing()
        }
        fn synchronize(&self, _: u32, _: Instant) -> Result<()> {
            nothing()
        }
        fn name(&self, _: u32) -> Result<String> {
            nothing()
        }
        fn new_stream(&self, _: u32, _: bool) -> Result<Arc<dyn Stream>> {
            nothing()
        }
        fn alloc(&self, _: u32, _: DType, _: &[usize]) -> Result<Tensor> {
            nothing()
        }
        fn copy_in(&self, _: &[u8], _: &mut Tensor, _: &dyn Stream) -> Result<()> {
            nothing()
        }
        fn copy_out(&self, _: &Tensor, _: &mut [u8], _: &dyn Stream) -> Result<()> {
            nothing()
        }
        fn native_fp8(&self, index: u32) -> bool {
            index == 1
        }
    }

    #[test]
    fn auto_is_fp8_on_the_very_device_that_has_it() {
        ftcore::register_accelerator(Arc::new(Mixed)).unwrap();
        let codec = |index| CodecChoice::Auto.on(&Device::new(Mixed.kind(), index));
        assert_eq!((codec(0), codec(1)), (Codec::Int8B64, Codec::MxE4M3));
    }

    #[test]
    fn two_bits_without_error_feedback_are_refused() {
        let mut options = QuantizeOptions::default();
        let e = options.check(Codec::Int2B64).unwrap_err();
        assert!(e.to_string().contains("error_feedback"), "{e}");
        options.error_feedback = true;
        options.check(Codec::Int2B64).unwrap();
        options.moves = Moves::Quantized;
        assert!(options.check(Codec::Int2B64).is_err());
        options.check(Codec::Int4B64).unwrap();
    }
}
