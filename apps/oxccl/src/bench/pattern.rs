//! The data of the correctness check: every rank can say what every other one sends, so each checks its own result.
//!
//! Values are 0 to 3 by a hash of (rank, position, round), so that a shifted block, a stale buffer or a missing rank
//! shows; their sums over up to 64 ranks are exact in every element type that is reduced.

use oxccl::core::{DType, Result, Tensor};

use super::plan::{Op, Row};

/// What the elements of one rank are in one round.
pub(super) struct Pattern {
    rank: u64,
    ranks: u64,
    round: u64,
    /// Elements per part.
    part: u64,
    width: usize,
    /// The bytes of each value that can occur, 0 to 3 × ranks.
    codes: Vec<Vec<u8>>,
}

impl Pattern {
    pub(super) fn new(dtype: DType, row: Row, rank: u32, ranks: u32, round: u64) -> Self {
        Self {
            rank: u64::from(rank),
            ranks: u64::from(ranks),
            round,
            part: (row.count as u64 / u64::from(ranks.max(1))).max(1),
            width: dtype.size(),
            codes: (0..=3 * ranks).map(|n| encode(dtype, n)).collect(),
        }
    }

    /// Sets `input` to this rank's data.
    pub(super) fn fill(&self, input: &mut Tensor) {
        for (element, i) in input.bytes_mut().chunks_exact_mut(self.width).zip(0u64..) {
            if let Some(code) = self.code(self.value(self.rank, i)) {
                element.copy_from_slice(code);
            }
        }
    }

    /// How many elements of `output` are not what `op` must have made of the inputs.
    pub(super) fn count_wrong(&self, op: Op, output: &Tensor) -> Result<u64> {
        let elements = output.bytes().chunks_exact(self.width);
        let wrong = elements
            .zip(0u64..)
            .filter(|(element, i)| self.code(self.expected(op, *i)) != Some(*element));
        Ok(wrong.count() as u64)
    }

    fn code(&self, value: usize) -> Option<&[u8]> {
        self.codes.get(value).map(Vec::as_slice)
    }

    fn value(&self, rank: u64, i: u64) -> usize {
        let mixed = (i + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .wrapping_add((rank * 31 + self.round).wrapping_mul(0xD6E8_FEB8_6659_FD93));
        ((mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 62) as usize
    }

    fn sum(&self, i: u64) -> usize {
        (0..self.ranks).map(|rank| self.value(rank, i)).sum()
    }

    fn expected(&self, op: Op, i: u64) -> usize {
        let own = self.rank * self.part;
        match op {
            Op::AllReduce => self.sum(i),
            Op::Reduce if self.rank == 0 => self.sum(i),
            Op::Reduce => self.value(self.rank, i),
            Op::Broadcast | Op::PingPong => self.value(0, i),
            Op::AllGatherInto => self.value(i / self.part, i % self.part),
            Op::ReduceScatterInto => self.sum(own + i),
            Op::AllToAllInto => self.value(i / self.part, own + i % self.part),
            Op::SendRecv => self.value((self.rank + self.ranks - 1) % self.ranks, i),
            Op::Barrier => 0,
        }
    }
}

/// The bytes of `n` as one element. Integers wrap as sums do, any other number than 0 is true, and f8, which is only
/// moved, takes `n` as its bits.
fn encode(dtype: DType, n: u32) -> Vec<u8> {
    match dtype {
        DType::F64 => f64::from(n).to_ne_bytes().to_vec(),
        DType::F32 => (n as f32).to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(n as f32).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(n as f32).to_ne_bytes().to_vec(),
        DType::Bool => vec![u8::from(n != 0)],
        other => match other.size() {
            8 => u64::from(n).to_ne_bytes().to_vec(),
            4 => n.to_ne_bytes().to_vec(),
            2 => (n as u16).to_ne_bytes().to_vec(),
            _ => vec![n as u8],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_result_has_no_wrong_element_and_a_missing_rank_or_a_stale_round_has_many() {
        let row = Row {
            op: Op::AllReduce,
            count: 1000,
            bytes: 4000,
        };
        let of = |rank, round| Pattern::new(DType::F32, row, rank, 2, round);
        let data = |rank| {
            let mut t = Tensor::zeros(DType::F32, 1000);
            of(rank, 1).fill(&mut t);
            t.into_vec::<f32>().unwrap()
        };
        let sum: Vec<f32> = data(0).iter().zip(data(1)).map(|(a, b)| a + b).collect();
        let wrong = |data: Vec<f32>, round| {
            of(0, round)
                .count_wrong(Op::AllReduce, &Tensor::from_vec(data))
                .unwrap()
        };
        assert_eq!(wrong(sum.clone(), 1), 0);
        assert!(wrong(data(0), 1) > 500);
        assert!(wrong(sum.clone(), 2) > 500);
        let mut one = sum;
        one[999] += 1.0;
        assert_eq!(wrong(one, 1), 1);
    }

    #[test]
    fn every_dtype_has_codes_of_its_own_width() {
        for dtype in DType::ALL {
            assert!(
                (0..=192).all(|n| encode(dtype, n).len() == dtype.size()),
                "{dtype}"
            );
            assert_ne!(encode(dtype, 0), encode(dtype, 1));
        }
    }
}
