//! The few element-wise kernels that NCCL has no operation for, as PTX that the driver compiles.
//!
//! - `ox_bool`: bytes become 0 or 1. `ox_parity`: bytes become their lowest bit (an exclusive or of truths that were summed).
//! - `ox_div_T`: a sum becomes the mean over the contributors, whose number is a 32-bit integer in device memory; none means 0.
//! - `ox_mul_T`: every element by a factor of the same type in device memory, which is what `premul_sum` is in a world of one. NCCL 2.28.9
//!   leaves out what is behind the last whole 16 bytes there.
//! - `ox_key_{max,min}_T`, `ox_unkey_…`: floats as integers of the same order in which NaN beats everything, and back. NCCL's own
//!   minimum and maximum of floats let NaN lose, which would hide it (INV-11). 16-bit floats take 32-bit keys.
//!
//! Every kernel takes three 64-bit words (two addresses and the number of elements) and any grid. PTX 6.4 for compute capability 6.0
//! runs on everything later.

use ftcore::DType;

/// Which extreme wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extreme {
    Max,
    Min,
}

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// (from, to, count)
    Bool,
    /// (from, to, count)
    Parity,
    /// (data, address of the number of contributors, count)
    Div(DType),
    /// (data, address of the factor, count)
    Mul(DType),
    /// (floats, keys, count)
    Key(Extreme, DType),
    /// (keys, floats, count)
    Unkey(Extreme, DType),
}

const DIVIDED: [DType; 10] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U8,
];
const KEYED: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// All kernels, in the order of [`source`].
pub(crate) fn all() -> Vec<Kernel> {
    let mut kernels = vec![Kernel::Bool, Kernel::Parity];
    kernels.extend(DIVIDED.map(Kernel::Div));
    kernels.extend(KEYED.map(Kernel::Mul));
    for extreme in [Extreme::Max, Extreme::Min] {
        kernels.extend(KEYED.map(|d| Kernel::Key(extreme, d)));
        kernels.extend(KEYED.map(|d| Kernel::Unkey(extreme, d)));
    }
    kernels
}

/// The dtype of the keys of a float type: signed integers that NCCL reduces.
pub(crate) fn key_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::I64
    } else {
        DType::I32
    }
}

impl Kernel {
    /// The name in the module.
    pub(crate) fn name(self) -> String {
        let extreme = |e| if e == Extreme::Max { "max" } else { "min" };
        match self {
            Self::Bool => "ox_bool".to_string(),
            Self::Parity => "ox_parity".to_string(),
            Self::Div(d) => format!("ox_div_{d}"),
            Self::Mul(d) => format!("ox_mul_{d}"),
            Self::Key(e, d) => format!("ox_key_{}_{d}", extreme(e)),
            Self::Unkey(e, d) => format!("ox_unkey_{}_{d}", extreme(e)),
        }
    }

    /// The instructions for element `%rd1`: addresses in `%rd5` and `%rd6`.
    fn body(self) -> String {
        // Where element i of an array of `size` bytes per element lies.
        let at = |register: &str, base: &str, size: usize| {
            format!("mad.lo.u64 {register}, %rd1, {size}, {base};\n")
        };
        match self {
            Self::Bool => {
                at("%rd7", "%rd5", 1)
                    + &at("%rd8", "%rd6", 1)
                    + "ld.u8 %r5, [%rd7];\nsetp.ne.u32 %p2, %r5, 0;\nselp.u32 %r6, 1, 0, %p2;\nst.u8 [%rd8], %r6;\n"
            }
            Self::Parity => {
                at("%rd7", "%rd5", 1)
                    + &at("%rd8", "%rd6", 1)
                    + "ld.u8 %r5, [%rd7];\nand.b32 %r6, %r5, 1;\nst.u8 [%rd8], %r6;\n"
            }
            Self::Div(dtype) => divide(dtype, &at("%rd7", "%rd5", dtype.size())),
            Self::Mul(dtype) => multiply(dtype, &at("%rd7", "%rd5", dtype.size())),
            Self::Key(extreme, dtype) => {
                let keys = key_dtype(dtype).size();
                at("%rd7", "%rd5", dtype.size()) + &at("%rd8", "%rd6", keys) + &key(extreme, dtype)
            }
            Self::Unkey(extreme, dtype) => {
                let keys = key_dtype(dtype).size();
                at("%rd7", "%rd5", keys) + &at("%rd8", "%rd6", dtype.size()) + &unkey(extreme, dtype)
            }
        }
    }
}

/// `[%rd7] /= count`, where the count is the word at `%rd6`; a count of zero gives zero.
fn divide(dtype: DType, address: &str) -> String {
    let count = "ld.s32 %r5, [%rd6];\nsetp.eq.s32 %p2, %r5, 0;\n";
    let work = match dtype {
        DType::F64 => {
            "ld.f64 %d1, [%rd7];\ncvt.rn.f64.s32 %d2, %r5;\ndiv.rn.f64 %d3, %d1, %d2;\n\
             @%p2 mov.f64 %d3, 0d0000000000000000;\nst.f64 [%rd7], %d3;\n"
        }
        DType::F32 => {
            "ld.f32 %f1, [%rd7];\ncvt.rn.f32.s32 %f2, %r5;\ndiv.rn.f32 %f3, %f1, %f2;\n\
             @%p2 mov.f32 %f3, 0f00000000;\nst.f32 [%rd7], %f3;\n"
        }
        DType::F16 => {
            "ld.b16 %h1, [%rd7];\ncvt.f32.f16 %f1, %h1;\ncvt.rn.f32.s32 %f2, %r5;\ndiv.rn.f32 %f3, %f1, %f2;\n\
             @%p2 mov.f32 %f3, 0f00000000;\ncvt.rn.f16.f32 %h2, %f3;\nst.b16 [%rd7], %h2;\n"
        }
        DType::BF16 => {
            return format!(
                "{address}{count}ld.u16 %r6, [%rd7];\nshl.b32 %r6, %r6, 16;\nmov.b32 %f1, %r6;\ncvt.rn.f32.s32 %f2, %r5;\n\
                 div.rn.f32 %f3, %f1, %f2;\n@%p2 mov.f32 %f3, 0f00000000;\n{TO_BF16}st.u16 [%rd7], %r9;\n"
            );
        }
        DType::I64 => {
            "ld.s64 %rd9, [%rd7];\ncvt.s64.s32 %rd10, %r5;\n@%p2 mov.s64 %rd10, 1;\n@%p2 mov.s64 %rd9, 0;\n\
             div.s64 %rd11, %rd9, %rd10;\nst.s64 [%rd7], %rd11;\n"
        }
        DType::U64 => {
            "ld.u64 %rd9, [%rd7];\ncvt.u64.u32 %rd10, %r5;\n@%p2 mov.u64 %rd10, 1;\n@%p2 mov.u64 %rd9, 0;\n\
             div.u64 %rd11, %rd9, %rd10;\nst.u64 [%rd7], %rd11;\n"
        }
        signed @ (DType::I32 | DType::I8) => return whole(count, address, signed, "s"),
        unsigned => return whole(count, address, unsigned, "u"),
    };
    format!("{address}{count}{work}")
}

/// To bf16 by hand, `%r9` of `%f3`, as the instruction for it needs a later architecture: to nearest even, and NaN must not become infinity.
const TO_BF16: &str = "mov.b32 %r7, %f3;\nshr.u32 %r8, %r7, 16;\nand.b32 %r9, %r8, 1;\nadd.u32 %r9, %r9, 32767;\n\
    add.u32 %r9, %r9, %r7;\nshr.u32 %r9, %r9, 16;\nsetp.nan.f32 %p3, %f3, %f3;\nselp.b32 %r9, 32704, %r9, %p3;\n";

/// `[%rd7] *= factor`, which lies at `%rd6`. The product of two 16-bit floats is exact in 32 bits, so it is rounded once.
fn multiply(dtype: DType, address: &str) -> String {
    let work = match dtype {
        DType::F64 => {
            "ld.f64 %d1, [%rd7];\nld.f64 %d2, [%rd6];\nmul.rn.f64 %d3, %d1, %d2;\nst.f64 [%rd7], %d3;\n"
                .to_string()
        }
        DType::F16 => {
            "ld.b16 %h1, [%rd7];\ncvt.f32.f16 %f1, %h1;\nld.b16 %h2, [%rd6];\ncvt.f32.f16 %f2, %h2;\n\
             mul.rn.f32 %f3, %f1, %f2;\ncvt.rn.f16.f32 %h3, %f3;\nst.b16 [%rd7], %h3;\n"
                .to_string()
        }
        DType::BF16 => format!(
            "ld.u16 %r5, [%rd7];\nshl.b32 %r5, %r5, 16;\nmov.b32 %f1, %r5;\nld.u16 %r6, [%rd6];\nshl.b32 %r6, %r6, 16;\n\
             mov.b32 %f2, %r6;\nmul.rn.f32 %f3, %f1, %f2;\n{TO_BF16}st.u16 [%rd7], %r9;\n"
        ),
        _ => "ld.f32 %f1, [%rd7];\nld.f32 %f2, [%rd6];\nmul.rn.f32 %f3, %f1, %f2;\nst.f32 [%rd7], %f3;\n"
            .to_string(),
    };
    format!("{address}{work}")
}

/// The division of integers of at most 32 bits.
fn whole(count: &str, address: &str, dtype: DType, sign: &str) -> String {
    let bits = dtype.size() * 8;
    format!(
        "{address}{count}ld.{sign}{bits} %r6, [%rd7];\n@%p2 mov.u32 %r5, 1;\n@%p2 mov.u32 %r6, 0;\n\
         div.{sign}32 %r7, %r6, %r5;\nst.u{bits} [%rd7], %r7;\n"
    )
}

fn key(extreme: Extreme, dtype: DType) -> String {
    if dtype == DType::F64 {
        let nan = if extreme == Extreme::Max {
            "0x7FFFFFFFFFFFFFFF"
        } else {
            "0x8000000000000000"
        };
        return format!(
            "ld.b64 %rd9, [%rd7];\nmov.b64 %d1, %rd9;\nsetp.nan.f64 %p2, %d1, %d1;\nshr.s64 %rd10, %rd9, 63;\n\
             shr.u64 %rd10, %rd10, 1;\nxor.b64 %rd10, %rd10, %rd9;\nmov.b64 %rd11, {nan};\n\
             selp.b64 %rd10, %rd11, %rd10, %p2;\nst.b64 [%rd8], %rd10;\n"
        );
    }
    let load = match dtype {
        DType::F16 => "ld.b16 %h1, [%rd7];\ncvt.f32.f16 %f1, %h1;\nmov.b32 %r5, %f1;\n",
        DType::BF16 => "ld.u16 %r5, [%rd7];\nshl.b32 %r5, %r5, 16;\nmov.b32 %f1, %r5;\n",
        _ => "ld.b32 %r5, [%rd7];\nmov.b32 %f1, %r5;\n",
    };
    let nan = if extreme == Extreme::Max {
        "0x7FFFFFFF"
    } else {
        "0x80000000"
    };
    format!(
        "{load}setp.nan.f32 %p2, %f1, %f1;\nshr.s32 %r6, %r5, 31;\nshr.u32 %r6, %r6, 1;\nxor.b32 %r6, %r6, %r5;\n\
         mov.b32 %r7, {nan};\nselp.b32 %r6, %r7, %r6, %p2;\nst.b32 [%rd8], %r6;\n"
    )
}

fn unkey(extreme: Extreme, dtype: DType) -> String {
    if dtype == DType::F64 {
        let nan = if extreme == Extreme::Max {
            "0x7FFFFFFFFFFFFFFF"
        } else {
            "0x8000000000000000"
        };
        return format!(
            "ld.b64 %rd9, [%rd7];\nmov.b64 %rd11, {nan};\nsetp.eq.s64 %p2, %rd9, %rd11;\nshr.s64 %rd10, %rd9, 63;\n\
             shr.u64 %rd10, %rd10, 1;\nxor.b64 %rd10, %rd10, %rd9;\nmov.b64 %rd11, 0x7FF8000000000000;\n\
             selp.b64 %rd10, %rd11, %rd10, %p2;\nst.b64 [%rd8], %rd10;\n"
        );
    }
    let nan = if extreme == Extreme::Max {
        "0x7FFFFFFF"
    } else {
        "0x80000000"
    };
    let store = match dtype {
        DType::F16 => "mov.b32 %f1, %r6;\ncvt.rn.f16.f32 %h1, %f1;\nst.b16 [%rd8], %h1;\n",
        DType::BF16 => "shr.u32 %r6, %r6, 16;\nst.u16 [%rd8], %r6;\n",
        _ => "st.b32 [%rd8], %r6;\n",
    };
    format!(
        "ld.b32 %r5, [%rd7];\nmov.b32 %r7, {nan};\nsetp.eq.s32 %p2, %r5, %r7;\nshr.s32 %r6, %r5, 31;\n\
         shr.u32 %r6, %r6, 1;\nxor.b32 %r6, %r6, %r5;\nmov.b32 %r7, 0x7FC00000;\nselp.b32 %r6, %r7, %r6, %p2;\n{store}"
    )
}

/// The module: all kernels as PTX.
pub(crate) fn source() -> String {
    let mut text = String::from(".version 6.4\n.target sm_60\n.address_size 64\n");
    for kernel in all() {
        text.push_str(&format!(
            ".visible .entry {}(.param .u64 p0, .param .u64 p1, .param .u64 p2)\n{{\n\
             .reg .pred %p<4>;\n.reg .b16 %h<4>;\n.reg .b32 %r<12>;\n.reg .b64 %rd<12>;\n.reg .f32 %f<4>;\n.reg .f64 %d<4>;\n\
             ld.param.u64 %rd5, [p0];\nld.param.u64 %rd6, [p1];\nld.param.u64 %rd4, [p2];\n\
             mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\nmov.u32 %r3, %tid.x;\nmov.u32 %r4, %nctaid.x;\n\
             mul.wide.u32 %rd1, %r1, %r2;\ncvt.u64.u32 %rd2, %r3;\nadd.u64 %rd1, %rd1, %rd2;\nmul.wide.u32 %rd3, %r4, %r2;\n\
             NEXT:\nsetp.ge.u64 %p1, %rd1, %rd4;\n@%p1 bra DONE;\n{}add.u64 %rd1, %rd1, %rd3;\nbra NEXT;\nDONE:\nret;\n}}\n",
            kernel.name(),
            kernel.body()
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_its_own_entry() {
        let source = source();
        for kernel in all() {
            let entry = format!(".entry {}(", kernel.name());
            assert_eq!(source.matches(&entry).count(), 1, "{entry}");
        }
    }

    /// The assembler of the CUDA toolkit, where one is installed (OXCCL_PTXAS or PATH), accepts the text for old and new chips.
    #[test]
    fn the_assembler_accepts_the_text() {
        let ptxas = std::env::var_os("OXCCL_PTXAS").unwrap_or_else(|| "ptxas".into());
        let file = std::env::temp_dir().join(format!("oxccl-kernels-{}.ptx", std::process::id()));
        std::fs::write(&file, source()).unwrap();
        for arch in ["sm_75", "sm_90"] {
            let out = std::process::Command::new(&ptxas)
                .arg(format!("--gpu-name={arch}"))
                .args(["-o", "/dev/null"])
                .arg(&file)
                .output();
            let Ok(out) = out else {
                eprintln!("not checked: no ptxas here (set OXCCL_PTXAS)");
                break;
            };
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        }
        std::fs::remove_file(&file).unwrap();
    }
}
