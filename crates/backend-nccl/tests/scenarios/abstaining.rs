//! A rank that takes part without contributing leaves every element as the others have it: each reduction has its own value that changes
//! nothing, for each type.

use std::time::Duration;

use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, DType, Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Tensor, deadline_in,
};

use super::kit::*;
use super::{Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(0.5),
];

/// Four elements of both signs, the extremes of the integers among them, as bytes; floats are 1, −2, 0.5 and −4 times `factor`, which is 1
/// or a half.
fn elements(dtype: DType, factor: f64) -> Vec<u8> {
    let floats = [1.0, -2.0, 0.5, -4.0].map(|v| v * factor);
    let halves = |bits: fn(f64) -> u16| floats.iter().flat_map(|v| bits(*v).to_ne_bytes()).collect();
    match dtype {
        DType::F64 => floats.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        DType::F32 => floats.iter().flat_map(|v| (*v as f32).to_ne_bytes()).collect(),
        DType::F16 => halves(|v| half::f16::from_f64(v).to_bits()),
        DType::BF16 => halves(|v| half::bf16::from_f64(v).to_bits()),
        DType::F8E4M3 => vec![0x38, 0xC0, 0x30, 0xC8],
        DType::F8E5M2 => vec![0x3C, 0xC0, 0x38, 0xC4],
        DType::Bool => vec![1, 0, 0, 1],
        other => {
            let (size, signed) = (
                other.size(),
                matches!(other, DType::I64 | DType::I32 | DType::I16 | DType::I8),
            );
            let least = if signed { 1i128 << (8 * size - 1) } else { 0 };
            let largest = if signed {
                least - 1
            } else {
                (1i128 << (8 * size)) - 1
            };
            // Minus two, or two below the end.
            let values = [1, -2, least, largest];
            let little = |v: i128| v.to_le_bytes().into_iter().take(size);
            values.into_iter().flat_map(little).collect()
        }
    }
}

fn upload(rank: u32, dtype: DType, bytes: &[u8]) -> Result<Tensor, Error> {
    let mut tensor = CudaAccelerator.alloc(on(rank), dtype, &[bytes.len() / dtype.size()])?;
    let stream = CudaAccelerator.new_stream(on(rank), false)?;
    CudaAccelerator.copy_in(bytes, &mut tensor, &*stream)?;
    stream.synchronize(deadline_in(SOON))?;
    Ok(tensor)
}

fn download(tensor: &Tensor) -> Result<Vec<u8>, Error> {
    let index = tensor.device().index;
    let mut bytes = vec![0; tensor.byte_len()];
    CudaAccelerator.copy_out(tensor, &mut bytes, &*CudaAccelerator.new_stream(index, false)?)?;
    Ok(bytes)
}

/// The result on a rank that gets one must be what the other rank, the contributor, has put in.
fn changes_nothing(rank: u32, group: &NcclGroup, contributor: u32, op: ReduceOp, dtype: DType) -> Outcome {
    let given = elements(dtype, 1.0);
    let scaled = matches!(op, ReduceOp::PremulSum(_));
    let want = elements(dtype, if scaled { 0.5 } else { 1.0 });
    // Of the rank that abstains nothing may be seen.
    let own = || match rank == contributor {
        true => upload(rank, dtype, &given),
        false => upload(rank, dtype, &vec![u8::from(dtype == DType::Bool); given.len()]),
    };
    let empty = || CudaAccelerator.alloc(on(rank), dtype, &[4]);
    let forms = [
        (
            Collective::AllReduce {
                tensors: vec![own()?],
                op,
            },
            true,
        ),
        (
            Collective::Reduce {
                tensor: own()?,
                op,
                root: 0,
            },
            rank == 0,
        ),
        (
            Collective::Reduce {
                tensor: own()?,
                op,
                root: 1,
            },
            rank == 1,
        ),
        (
            Collective::ReduceScatter {
                inputs: vec![own()?, own()?],
                output: empty()?,
                op,
            },
            true,
        ),
    ];
    for (form, has_result) in forms {
        let kind = form.kind();
        let options = SubmitOptions {
            contribute: rank == contributor,
            ..SubmitOptions::by(deadline_in(SOON))
        };
        let done = group.run(form, options).map_err(|r| r.error)?.take()?;
        let got = done.tensors.last().map(download).transpose()?;
        check(!has_result || got.as_ref() == Some(&want), || {
            format!(
                "{kind} with {op} of {dtype}, only rank {contributor} contributing: {got:?}, not {want:?}"
            )
        })?;
        check(!has_result || done.contributors == 1, || {
            format!("{kind}: {} contributors", done.contributors)
        })?;
    }
    Ok(())
}

fn every_type() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let mut tried = 0;
        for op in OPS {
            for dtype in DType::ALL {
                if group.capabilities().reduces(op, dtype) {
                    changes_nothing(rank, group, 0, op, dtype)?;
                    changes_nothing(rank, group, 1, op, dtype)?;
                    tried += 1;
                }
            }
        }
        // Six integers, four floats, bool and two of 8 bits: see the table of capabilities.
        check(tried == 13 + 13 + 10 + 11 + 11 + 3 + 4, || {
            format!("{tried} pairs of reduction and type")
        })
    })
}

/// Rank 1 abstains: its zeros by an infinite factor would be NaN.
fn infinite_factor() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let given = [1.0f32, -2.0, 0.5, -4.0].map(f32::to_ne_bytes).concat();
        let op = Collective::AllReduce {
            tensors: vec![upload(rank, DType::F32, &given)?],
            op: ReduceOp::PremulSum(f64::INFINITY),
        };
        let options = SubmitOptions {
            contribute: rank == 0,
            ..SubmitOptions::by(deadline_in(SOON))
        };
        let got = read(&group.run(op, options).map_err(|r| r.error)?.take_tensor()?)?;
        let signs = [1.0f32, -1.0, 1.0, -1.0].map(|s| s * f32::INFINITY);
        check(got == signs, || format!("{got:?}"))
    })
}

/// A factor that the type of the elements has only as infinity or as zero.
fn factors_that_do_not_fit() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    let scale = |dtype, factor| {
        let tensor = CudaAccelerator.alloc(0, dtype, &[4])?;
        Ok::<_, Error>(group.all_reduce(tensor, ReduceOp::PremulSum(factor))?)
    };
    let refused = [
        (DType::F16, 1e5),
        (DType::F16, -1e-9),
        (DType::BF16, 1e39),
        (DType::F32, 1e39),
        (DType::F32, 1e-60),
    ];
    for (dtype, factor) in refused {
        let e = scale(dtype, factor).err().ok_or("it was accepted")?;
        says(
            &e,
            ErrorKind::InvalidArgument,
            &["premul_sum", &dtype.to_string()],
        )?;
    }
    // Each type has these.
    for (dtype, factor) in [(DType::F16, 6e4), (DType::BF16, 1e38), (DType::F64, 1e300)] {
        scale(dtype, factor)?.wait_done()?;
    }
    for factor in [0.0, f64::INFINITY, f64::NAN] {
        scale(DType::F16, factor)?.wait_done()?;
    }
    Ok(())
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "call_of_a_rank_that_abstains_changes_nothing_in_any_type",
            &[],
            every_type,
        ),
        scenario(
            "call_of_a_rank_that_abstains_makes_no_nan_of_an_infinite_factor",
            &[],
            infinite_factor,
        ),
        scenario(
            "call_with_a_factor_that_the_type_cannot_hold_is_refused",
            &[],
            factors_that_do_not_fit,
        ),
    ]
}
