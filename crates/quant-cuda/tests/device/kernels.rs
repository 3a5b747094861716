//! Every kernel against what the host makes of the same values.

use ftcore::{DType, Device, DeviceKind, ErrorKind, Tensor};
use half::{bf16, f16};
use libtest_mimic::Trial;
use oxccl_quant_cuda::FORMATS;
use quant::{Codec, Encoding, Piece, Rounding, block_kernels};

use crate::trial;
use crate::values::*;

/// Around every edge: of a block, a warp's block, a part and a tile.
const COUNTS: [usize; 16] = [
    1, 2, 31, 32, 33, 63, 64, 65, 127, 2047, 2049, 8191, 8192, 8193, 24_653, 100_001,
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for codec in FORMATS {
        for kind in KINDS {
            let name = |what: &str| format!("{what}::{codec}::{}", kind.replace(' ', "_"));
            trials.push(trial(name("encodes_the_same_bytes"), move || {
                encodes(codec, kind)
            }));
            trials.push(trial(name("decodes_the_same_bits"), move || decodes(codec, kind)));
        }
        trials.push(trial(format!("decodes_any_bytes::{codec}"), move || {
            any_bytes(codec)
        }));
        trials.push(trial(format!("refuses_what_does_not_fit::{codec}"), move || {
            refuses(codec)
        }));
    }
    trials.push(trial("widens_every_code_of_16_bits", widens));
    trials.push(trial("narrows_to_nearest_even", narrows));
    trials.push(trial("divides_as_the_host_does", divides));
    trials
}

fn roundings() -> [Rounding; 3] {
    [
        Rounding::Nearest,
        Rounding::Stochastic { key: 7 },
        Rounding::Stochastic { key: u64::MAX - 5 },
    ]
}

fn encodes(codec: Codec, kind: &str) {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    for count in COUNTS {
        let values = values(kind, count + 3);
        let tensor = upload(DType::F32, &as_bytes(&values));
        for (rounding, first) in roundings().into_iter().zip([0, 5, (1 << 40) + 3]) {
            let how = Encoding {
                rounding,
                first,
                ..Encoding::default()
            };
            let (mut host, mut device) = (vec![1, 2, 3], vec![1, 2, 3]);
            let odd = codec.encode_with(how, &values[3..], &mut host);
            let counted = kernels
                .encode(codec, how, &tensor, 3..count + 3, &mut device)
                .unwrap();
            let what = format!("{count} values, {rounding:?}");
            assert_eq!(odd, counted, "{what}: how many are not finite");
            same(&what, &host, &device);
        }
    }
}

/// A NaN of two operands that are both NaN is either: only that it is one is compared.
fn plain(values: &[f32]) -> Vec<u32> {
    let one = |v: &f32| {
        if v.is_nan() {
            f32::NAN.to_bits()
        } else {
            v.to_bits()
        }
    };
    values.iter().map(one).collect()
}

fn decodes_bytes(codec: Codec, bytes: &[u8], count: usize, nan_scales: bool) {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    for add in [false, true] {
        let before = values("gradients", count + 2);
        let mut host = before.clone();
        match add {
            true => codec.decode_add(bytes, &mut host[1..=count]).unwrap(),
            false => codec.decode(bytes, &mut host[1..=count]).unwrap(),
        }
        let mut tensor = upload(DType::F32, &as_bytes(&before));
        kernels
            .decode(codec, bytes, add, &mut tensor, 1..count + 1)
            .unwrap();
        let device = floats(&tensor);
        let what = format!("{count} values, add {add}");
        match add || nan_scales {
            true => same(&what, &plain(&host), &plain(&device)),
            false => same(&what, &bits(&host), &bits(&device)),
        }
    }
}

fn decodes(codec: Codec, kind: &str) {
    for count in COUNTS {
        let mut bytes = Vec::new();
        codec.encode(&values(kind, count), &mut bytes);
        decodes_bytes(codec, &bytes, count, false);
    }
}

/// Nothing can fail on the content.
fn any_bytes(codec: Codec) {
    for count in COUNTS {
        let mut random = Random(count as u64);
        let bytes: Vec<u8> = (0..codec.encoded_len(count))
            .map(|_| random.next() as u8)
            .collect();
        decodes_bytes(codec, &bytes, count, true);
    }
}

fn refuses(codec: Codec) {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    let tensor = upload(DType::F32, &as_bytes(&[1.0; 10]));
    let how = Encoding::default();
    let mut out = Vec::new();
    assert_eq!(kernels.encode(codec, how, &tensor, 4..4, &mut out).unwrap(), 0);
    assert!(out.is_empty());
    let e = kernels.encode(codec, how, &tensor, 5..11, &mut out).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    let host = Tensor::from_vec(vec![1f32; 10]);
    let e = kernels.encode(codec, how, &host, 0..10, &mut out).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    let mut tensor = tensor;
    let short = vec![0; codec.encoded_len(10) - 1];
    let e = kernels
        .decode(codec, &short, false, &mut tensor, 0..10)
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    let e = kernels
        .encode(Codec::Int4B64, how, &tensor, 0..10, &mut out)
        .unwrap_err();
    assert!(
        e.kind() == ErrorKind::Unsupported && e.to_string().contains("int4"),
        "{e}"
    );
    assert!(kernels.zeros(&Device::CPU, 3).is_err());
}

/// All 65,536 codes, from their second on, behind one f32.
fn widens() {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    let codes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        let tensors = [
            upload(DType::F32, &as_bytes(&[0.0])),
            upload(dtype, &codes),
            upload(DType::F32, &as_bytes(&[2.5, -1.0])),
        ];
        let pieces = [
            Piece {
                tensor: 2,
                range: 1..2,
            },
            Piece {
                tensor: 1,
                range: 1..65_536,
            },
        ];
        let device = floats(&kernels.gather(&tensors, &pieces).unwrap());
        let mut host = vec![-1.0];
        host.extend((1..=u16::MAX).map(|code| match dtype {
            DType::F16 => f16::from_bits(code).to_f32(),
            _ => bf16::from_bits(code).to_f32(),
        }));
        same(&dtype.to_string(), &bits(&host), &bits(&device));
    }
}

fn narrows() {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    for kind in KINDS {
        let all = values(kind, 50_000);
        let tensor = upload(DType::F32, &as_bytes(&all));
        for dtype in [DType::F16, DType::BF16] {
            let mut tensors = [
                upload(dtype, &[0xAA; 80_002]),
                upload(DType::F32, &as_bytes(&[7.0; 10_001])),
            ];
            let pieces = [
                Piece {
                    tensor: 0,
                    range: 1..40_001,
                },
                Piece {
                    tensor: 1,
                    range: 0..10_000,
                },
            ];
            kernels.scatter(&tensor, &mut tensors, &pieces).unwrap();
            let mut host = vec![0xAAAA];
            host.extend(all[..40_000].iter().map(|v| match dtype {
                DType::F16 => f16::from_f32(*v).to_bits(),
                _ => bf16::from_f32(*v).to_bits(),
            }));
            let device: Vec<u16> = download(&tensors[0])
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| u16::from_ne_bytes(*b))
                .collect();
            same(&format!("{kind} to {dtype}"), &host, &device);
            let mut host = all[40_000..].to_vec();
            host.push(7.0);
            same(kind, &bits(&host), &bits(&floats(&tensors[1])));
        }
    }
}

fn divides() {
    let kernels = block_kernels(&DeviceKind::Cuda).unwrap();
    for kind in KINDS {
        for divisor in [1.0, 2.0, 3.0, 7.0, 1000.0] {
            let all = values(kind, 5000);
            let mut tensor = upload(DType::F32, &as_bytes(&all));
            kernels.divide(&mut tensor, 10..4990, divisor).unwrap();
            let mut host = all;
            host[10..4990].iter_mut().for_each(|v| *v /= divisor);
            same(
                &format!("{kind} / {divisor}"),
                &bits(&host),
                &bits(&floats(&tensor)),
            );
        }
    }
}
