//! What the kernels promise, for every way in which this machine can run them.

use std::hint::black_box;
use std::ops::Range;

use ftcore::float_mode::foreign::{MODES, with};
use ftcore::{Bool, Element, Tensor};
use proptest::prelude::*;

use super::*;

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(2.0),
];

fn pair<T: Element>(op: ReduceOp, a: T, b: T) -> T {
    let mut into = Tensor::from_vec(vec![a]);
    let from = Tensor::from_vec(vec![b]);
    reduce(T::DTYPE, op, into.bytes_mut(), from.bytes()).unwrap();
    into.as_slice::<T>().unwrap()[0]
}

#[test]
fn the_table_says_exactly_what_the_kernels_do() {
    for dtype in DType::ALL {
        for op in OPS {
            let mut into = Tensor::zeros(dtype, 3);
            let from = Tensor::zeros(dtype, 3);
            let done = reduce(dtype, op, into.bytes_mut(), from.bytes())
                .and_then(|()| fill_identity(dtype, op, into.bytes_mut()))
                .and_then(|()| match op {
                    ReduceOp::Avg => divide(dtype, into.bytes_mut(), 2),
                    ReduceOp::PremulSum(f) => scale(dtype, into.bytes_mut(), f),
                    _ => Ok(()),
                });
            let advertised = table()[usize::from(op.code())].contains(dtype);
            assert_eq!(done.is_ok(), advertised, "{op} on {dtype}");
        }
    }
}

#[test]
fn the_identity_changes_nothing() {
    for dtype in DType::ALL {
        for op in OPS {
            if !table()[usize::from(op.code())].contains(dtype) {
                continue;
            }
            let mut value = Tensor::zeros(dtype, 4);
            let pattern: Vec<u8> = match dtype {
                DType::Bool => vec![0, 1, 1, 0],
                DType::F16 => [1.0f32, -2.5, 0.0, 65504.0]
                    .iter()
                    .flat_map(|&x| f16::from_f32(x).to_ne_bytes())
                    .collect(),
                DType::BF16 => [1.0f32, -2.5, 0.0, 3e38]
                    .iter()
                    .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                    .collect(),
                DType::F32 => [1.0f32, -2.5, 0.0, 3e38]
                    .iter()
                    .flat_map(|x| x.to_ne_bytes())
                    .collect(),
                DType::F64 => [1.0f64, -2.5, 0.0, 3e300]
                    .iter()
                    .flat_map(|x| x.to_ne_bytes())
                    .collect(),
                _ => (0..4 * dtype.size()).map(|i| (i * 37) as u8).collect(),
            };
            value.bytes_mut().copy_from_slice(&pattern);
            let mut neutral = Tensor::zeros(dtype, 4);
            fill_identity(dtype, op, neutral.bytes_mut()).unwrap();
            reduce(dtype, op, value.bytes_mut(), neutral.bytes()).unwrap();
            assert_eq!(
                value.bytes(),
                &pattern[..],
                "{op} on {dtype}, identity on the right"
            );
            reduce(dtype, op, neutral.bytes_mut(), value.bytes()).unwrap();
            assert_eq!(
                neutral.bytes(),
                &pattern[..],
                "{op} on {dtype}, identity on the left"
            );
        }
    }
}

#[test]
fn l16_bool_is_canonical_and_nan_propagates_from_either_side() {
    for (op, both) in [(ReduceOp::Sum, 1), (ReduceOp::Bxor, 0), (ReduceOp::Product, 1)] {
        assert_eq!(pair(op, Bool(2), Bool(255)), Bool(both), "{op}");
    }
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
        assert!(pair(op, f32::NAN, 1.0).is_nan() && pair(op, 1.0, f32::NAN).is_nan());
        assert!(pair(op, f64::NAN, 1.0).is_nan() && pair(op, 1.0, f64::NAN).is_nan());
        let (n, one) = (f16::NAN, f16::ONE);
        assert!(pair(op, n, one).is_nan() && pair(op, one, n).is_nan());
        let (n, one) = (bf16::NAN, bf16::ONE);
        assert!(pair(op, n, one).is_nan() && pair(op, one, n).is_nan());
    }
    assert_eq!(pair(ReduceOp::Sum, 200u8, 200u8), 144, "documented wrap-around");
}

#[test]
fn averages_divide_toward_zero_and_survive_more_ranks_than_the_type_holds() {
    let mut t = Tensor::from_vec(vec![-7i8, 7, 100]);
    divide(DType::I8, t.bytes_mut(), 2).unwrap();
    assert_eq!(t.as_slice::<i8>().unwrap(), [-3, 3, 50]);
    divide(DType::I8, t.bytes_mut(), 200).unwrap();
    assert_eq!(t.as_slice::<i8>().unwrap(), [0, 0, 0]);
    let mut t = Tensor::from_vec(vec![f32::NAN, 3.0]);
    divide(DType::F32, t.bytes_mut(), 0).unwrap();
    assert_eq!(t.as_slice::<f32>().unwrap(), [0.0, 0.0]);
}

/// xorshift64*: the same bytes on every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// What breaks shortcuts: zeros of both signs, infinities, NaNs with payloads (quiet, signalling, negative), the largest and
/// the smallest numbers, subnormals, ties in rounding. As upper bits of the element; f64, f32 and bf16 share the pattern.
fn specials(dtype: DType) -> Vec<u64> {
    let f = |exponent: u32, mantissa: u32| -> Vec<u64> {
        let top = ((1u64 << exponent) - 1) << mantissa;
        let sign = 1u64 << (exponent + mantissa);
        let one = ((1u64 << (exponent - 1)) - 1) << mantissa;
        let positive = [
            0,
            1,
            2,
            (1 << mantissa) - 1,
            1 << mantissa,
            one,
            one + 1,
            one + (1 << (mantissa - 1)),
            top - 1,
            top,
            top + 1,
            top + (1 << (mantissa - 1)),
            top + (1 << mantissa) - 1,
        ];
        positive.iter().flat_map(|&bits| [bits, bits | sign]).collect()
    };
    match dtype {
        DType::F64 => f(11, 52),
        DType::F32 => f(8, 23),
        DType::F16 => f(5, 10),
        DType::BF16 => f(8, 7),
        _ => vec![
            0,
            1,
            2,
            0x7F,
            0x80,
            0xFF,
            0x7FFF,
            0x8000,
            u64::MAX,
            i64::MAX as u64,
            1 << 63,
        ],
    }
}

/// `count` elements: random bits, every third one special.
fn elements(dtype: DType, count: usize, noise: &mut Noise) -> Vec<u8> {
    let specials = specials(dtype);
    (0..count)
        .flat_map(|_| {
            let bits = noise.next();
            let value = match bits % 3 {
                0 => specials[noise.next() as usize % specials.len()],
                _ => bits.rotate_left(17),
            };
            value.to_le_bytes().into_iter().take(dtype.size())
        })
        .collect()
}

/// `data` somewhere in a larger buffer, with bytes around it that must not change.
struct Placed {
    buffer: Vec<u8>,
    range: Range<usize>,
}

impl Placed {
    fn new(data: &[u8], offset: usize) -> Self {
        let mut buffer = vec![0xA5; offset + data.len() + 64];
        buffer[offset..offset + data.len()].copy_from_slice(data);
        Self {
            buffer,
            range: offset..offset + data.len(),
        }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.buffer[self.range.clone()]
    }

    fn checked(mut self) -> Vec<u8> {
        let data = self.get().to_vec();
        self.get().fill(0xA5);
        assert!(
            self.buffer.iter().all(|b| *b == 0xA5),
            "bytes outside were written"
        );
        data
    }
}

/// One call in every way that there is; all must give the same bytes. Returns them.
fn same_everywhere(dtype: DType, op: ReduceOp, a: &[u8], b: &[u8], offsets: [usize; 3]) -> Vec<u8> {
    let mut expected = a.to_vec();
    let from = b;
    Width::Plain(Plain)
        .reduce(
            dtype,
            op,
            Operands::InPlace {
                into: &mut expected,
                from,
            },
        )
        .unwrap();
    for width in Width::available() {
        let what = format!("{op} on {dtype}, {} bytes, {width:?}, at {offsets:?}", a.len());
        let mut from = Placed::new(b, offsets[1]);
        let mut into = Placed::new(a, offsets[0]);
        let operands = Operands::InPlace {
            into: into.get(),
            from: from.get(),
        };
        width.reduce(dtype, op, operands).unwrap();
        assert_eq!(into.checked(), expected, "{what}, in place");
        assert_eq!(from.checked(), b, "{what}: the other operand was changed");

        // The other way round: it must not show.
        for (a, b) in [(a, b), (b, a)] {
            let mut out = Placed::new(&vec![0x5A; a.len()], offsets[2]);
            let mut a = Placed::new(a, offsets[0]);
            let mut b = Placed::new(b, offsets[1]);
            let operands = Operands::Into {
                out: out.get(),
                a: a.get(),
                b: b.get(),
            };
            width.reduce(dtype, op, operands).unwrap();
            assert_eq!(out.checked(), expected, "{what}, three operands");
        }
    }
    expected
}

fn served() -> impl Iterator<Item = (DType, ReduceOp)> {
    DType::ALL.into_iter().flat_map(|dtype| {
        OPS.into_iter()
            .filter(move |op| table_of(*op).contains(dtype))
            .map(move |op| (dtype, op))
    })
}

#[test]
fn every_width_gives_the_same_bytes_at_every_length_and_address() {
    let mut noise = Noise(1);
    for (dtype, op) in served() {
        for count in (0..67).chain([127, 1000, 1021]) {
            let a = elements(dtype, count, &mut noise);
            let b = elements(dtype, count, &mut noise);
            let offset = |n: u64| n as usize % 64;
            let offsets = [offset(noise.next()), offset(noise.next()), offset(noise.next())];
            same_everywhere(dtype, op, &a, &b, offsets);
        }
    }
}

#[test]
fn inv3_results_do_not_depend_on_how_the_thread_computes_with_floats_and_that_stays_as_it_is() {
    let mut noise = Noise(2);
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let a = elements(dtype, 1021, &mut noise);
        let b = elements(dtype, 1021, &mut noise);
        for width in Width::available() {
            let all = || {
                let mut results: Vec<Vec<u8>> = Vec::new();
                for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
                    let mut into = a.clone();
                    let operands = Operands::InPlace {
                        into: &mut into,
                        from: &b,
                    };
                    width.reduce(dtype, op, operands).unwrap();
                    results.push(into);
                }
                let mut into = a.clone();
                width.map(dtype, DivideBy(3), &mut into).unwrap();
                width.map(dtype, ScaleBy(0.1), &mut into).unwrap();
                results.push(into);
                results
            };
            let expected = all();
            for mode in MODES {
                // Compared outside: the mode is the kernels' affair alone.
                let results = with(mode, all);
                assert!(results == expected, "{dtype}, {width:?}, mode {mode:x}");
            }
        }
    }
}

#[test]
fn the_modes_of_these_tests_would_show() {
    let third = black_box(3f32);
    let [flushes, rounds] = MODES;
    // Read and used between the two changes of the mode: otherwise the compiler may add before or after them.
    let tiny = || black_box(f32::from_bits(1));
    for mode in MODES.into_iter().filter(|mode| *mode != 0) {
        assert_eq!(with(mode, || black_box(tiny() + tiny())).to_bits(), 0);
    }
    let two_thirds = || black_box(black_box(2f32) / third);
    assert_eq!(with(rounds, two_thirds) == two_thirds(), flushes == rounds);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn results_are_the_same_over_many_elements(
        seed in 1u64.., count in 0usize..9000, offsets in [0usize..64, 0usize..64, 0usize..64], which in 0usize..100,
    ) {
        let mut noise = Noise(seed);
        let all: Vec<_> = served().collect();
        let (dtype, op) = all[which % all.len()];
        let a = elements(dtype, count, &mut noise);
        let b = elements(dtype, count, &mut noise);
        same_everywhere(dtype, op, &a, &b, offsets);
    }

    #[test]
    fn a_streamed_copy_is_a_copy(seed in 1u64.., len in 0usize..5000, to in 0usize..130, from in 0usize..130) {
        let data = Noise(seed).bytes(len);
        let mut from = Placed::new(&data, from);
        let mut to = Placed::new(&vec![0; len], to);
        copy_stream(to.get(), from.get());
        prop_assert_eq!(to.checked(), data);
    }

    #[test]
    fn every_width_divides_and_scales_alike(
        seed in 1u64.., count in 0usize..300, offset in 0usize..64, by in 1u32..5000, factor in -1e3f64..1e3,
    ) {
        let mut noise = Noise(seed);
        for dtype in DType::ALL {
            if !table_of(ReduceOp::Avg).contains(dtype) {
                continue;
            }
            let data = elements(dtype, count, &mut noise);
            let run = |width: Width| {
                let (mut one, mut two) = (Placed::new(&data, offset), Placed::new(&data, offset));
                width.map(dtype, DivideBy(by), one.get()).unwrap();
                width.map(dtype, ScaleBy(factor), two.get()).unwrap();
                (one.checked(), two.checked())
            };
            let expected = run(Width::Plain(Plain));
            for width in Width::available() {
                prop_assert_eq!(&run(width), &expected, "{} {:?}", dtype, width);
            }
        }
    }
}

/// All 65536 values of a 16-bit float against each special one, against `half` and plain f32 arithmetic.
fn against_half<T: Copy>(
    dtype: DType,
    from_bits: fn(u16) -> T,
    to_f32: fn(T) -> f32,
    round: fn(f32) -> T,
    bits: fn(T) -> u16,
) {
    let nan = if dtype == DType::F16 { 0x7E00 } else { 0x7FC0u16 };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for special in specials(dtype) {
        let b = special as u16;
        let other: Vec<u8> = (0..=u16::MAX).flat_map(|_| b.to_ne_bytes()).collect();
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let got = same_everywhere(dtype, op, &all, &other, [0, 2, 4]);
            for (a, got) in (0..=u16::MAX).zip(got.as_chunks::<2>().0) {
                let (x, y) = (to_f32(from_bits(a)), to_f32(from_bits(b)));
                let value = match op {
                    ReduceOp::Sum => x + y,
                    ReduceOp::Product => x * y,
                    _ if x.is_nan() || y.is_nan() => f32::NAN,
                    ReduceOp::Min if x == y => f32::from_bits(x.to_bits() | y.to_bits()),
                    ReduceOp::Max if x == y => f32::from_bits(x.to_bits() & y.to_bits()),
                    ReduceOp::Min => x.min(y),
                    _ => x.max(y),
                };
                let expected = if value.is_nan() { nan } else { bits(round(value)) };
                let got = u16::from_ne_bytes(*got);
                assert_eq!(got, expected, "{op} of {a:#06x} and {b:#06x} as {dtype}");
            }
        }
    }
}

#[test]
fn f16_is_computed_in_f32_and_rounded_to_nearest_even_once() {
    against_half(
        DType::F16,
        f16::from_bits,
        f16::to_f32,
        f16::from_f32,
        f16::to_bits,
    );
}

#[test]
fn bf16_is_computed_in_f32_and_rounded_to_nearest_even_once() {
    against_half(
        DType::BF16,
        bf16::from_bits,
        bf16::to_f32,
        bf16::from_f32,
        bf16::to_bits,
    );
}

#[test]
fn zeros_have_an_order_and_nan_has_one_face_whatever_the_order_of_operands() {
    for (a, b) in [(0.0f32, -0.0f32), (-0.0, 0.0)] {
        assert_eq!(pair(ReduceOp::Min, a, b).to_bits(), (-0.0f32).to_bits());
        assert_eq!(pair(ReduceOp::Max, a, b).to_bits(), 0.0f32.to_bits());
    }
    let (one, two) = (f32::from_bits(0xFFC0_1234), f32::from_bits(0x7F80_0001));
    for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
        for (a, b) in [(one, two), (two, one), (one, 3.0), (3.0, two)] {
            assert_eq!(pair(op, a, b).to_bits(), 0x7FC0_0000, "{op} of {a} and {b}");
        }
    }
    assert_eq!(
        pair(ReduceOp::Sum, f64::INFINITY, f64::NEG_INFINITY).to_bits(),
        0x7FF8 << 48
    );
}
