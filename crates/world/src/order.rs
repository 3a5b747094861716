//! Who is in which group of large-model training, as pure arithmetic: ranks are counted through named dimensions in a stated order.
//!
//! The fastest dimension is written first, as in Megatron's `tp-cp-ep-dp-pp`: neighbours in tensor parallelism are neighbours in rank, so
//! they share a host.

use std::fmt;
use std::str::FromStr;

use ftcore::{Error, Result};

use crate::grid;

/// What ranks along one dimension share or split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dimension {
    /// Tensor parallel: parts of each matrix.
    Tensor,
    /// Context parallel: parts of the sequence.
    Context,
    /// Expert parallel: different experts.
    Expert,
    /// Data parallel: different batches, the same parameters.
    Data,
    /// Pipeline parallel: different layers.
    Pipeline,
}

impl Dimension {
    /// All of them, in the usual order, fastest first.
    pub const ALL: [Self; 5] = [
        Self::Tensor,
        Self::Context,
        Self::Expert,
        Self::Data,
        Self::Pipeline,
    ];

    /// The usual abbreviation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tp",
            Self::Context => "cp",
            Self::Expert => "ep",
            Self::Data => "dp",
            Self::Pipeline => "pp",
        }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dimension {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|d| d.name() == name);
        found.ok_or_else(|| Error::invalid(format!("'{name}' is not a dimension; known: tp, cp, ep, dp, pp")))
    }
}

/// The length of each dimension; 1 where nothing is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Tensor parallel.
    pub tensor: u32,
    /// Context parallel.
    pub context: u32,
    /// Expert parallel.
    pub expert: u32,
    /// Data parallel.
    pub data: u32,
    /// Pipeline parallel.
    pub pipeline: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            tensor: 1,
            context: 1,
            expert: 1,
            data: 1,
            pipeline: 1,
        }
    }
}

impl Sizes {
    /// The length of `dimension`.
    pub fn of(&self, dimension: Dimension) -> u32 {
        match dimension {
            Dimension::Tensor => self.tensor,
            Dimension::Context => self.context,
            Dimension::Expert => self.expert,
            Dimension::Data => self.data,
            Dimension::Pipeline => self.pipeline,
        }
    }
}

/// The ranks of a job in five dimensions.
///
/// ```
/// use oxccl_world::{Dimension, RankOrder, Sizes};
///
/// let sizes = Sizes { tensor: 2, data: 4, ..Sizes::default() };
/// let order = RankOrder::new("tp-dp", sizes)?; // neighbours differ in their part of the tensors
/// assert_eq!(order.groups(&[Dimension::Tensor])[0], [0, 1]);
/// assert_eq!(order.groups(&[Dimension::Data])[0], [0, 2, 4, 6]);
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankOrder {
    /// Fastest first.
    order: [(Dimension, u32); 5],
}

impl RankOrder {
    /// `order` names the dimensions, fastest first, as `tp-cp-ep-dp-pp`; those of length 1 may be left out.
    ///
    /// Errors: `InvalidArgument` for a dimension that is not known, is named twice, has length 0, or is longer than 1 and left out.
    pub fn new(order: &str, sizes: Sizes) -> Result<Self> {
        let mut named: Vec<Dimension> = Vec::new();
        for name in order.split('-').map(str::trim).filter(|n| !n.is_empty()) {
            let dimension: Dimension = name.parse()?;
            if named.contains(&dimension) {
                return Err(Error::invalid(format!("'{order}' names {dimension} twice")));
            }
            named.push(dimension);
        }
        for dimension in Dimension::ALL {
            let size = sizes.of(dimension);
            if size == 0 {
                return Err(Error::invalid(format!(
                    "{dimension} has length 0; 1 means that nothing is split"
                )));
            }
            if !named.contains(&dimension) {
                if size > 1 {
                    return Err(Error::invalid(format!(
                        "{dimension} has length {size} but no place in the order '{order}'"
                    )));
                }
                named.push(dimension);
            }
        }
        let mut placed = Dimension::ALL.map(|d| (d, 1));
        for (slot, dimension) in placed.iter_mut().zip(named) {
            *slot = (dimension, sizes.of(dimension));
        }
        let order = Self { order: placed };
        grid::size(order.lengths())?;
        Ok(order)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> u32 {
        self.order.iter().map(|(_, size)| size).product()
    }

    /// The position of `rank` in `dimension`. `None` if there is no such rank.
    pub fn coordinate(&self, rank: u32, dimension: Dimension) -> Option<u32> {
        if rank >= self.world_size() {
            return None;
        }
        let index = self.order.iter().position(|(d, _)| *d == dimension)?;
        grid::coordinates(self.lengths(), rank).nth(index)
    }

    /// How far neighbours along `dimension` are apart.
    pub(crate) fn stride(&self, dimension: Dimension) -> u32 {
        let faster = self.order.iter().take_while(|(d, _)| *d != dimension);
        faster.map(|(_, length)| length).product()
    }

    /// Fastest first.
    fn lengths(&self) -> impl Iterator<Item = u32> {
        self.order.iter().map(|(_, length)| *length)
    }

    /// The groups along `dimensions` taken together: ranks that differ in nothing else. Each group is in ascending order, the groups are
    /// ordered by their first rank, and every rank is in exactly one.
    pub fn groups(&self, dimensions: &[Dimension]) -> Vec<Vec<u32>> {
        let marked = self
            .order
            .map(|(dimension, length)| (length, dimensions.contains(&dimension)));
        grid::groups(&marked)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 16 ranks, tp 2, dp 2, pp 4: the example that Megatron's documentation works through.
    #[test]
    fn the_published_example_of_sixteen_ranks_comes_out() {
        let sizes = Sizes {
            tensor: 2,
            data: 2,
            pipeline: 4,
            ..Sizes::default()
        };
        let order = RankOrder::new("tp-cp-ep-dp-pp", sizes).unwrap();
        let pairs = |p: &[[u32; 2]]| p.iter().map(|g| g.to_vec()).collect::<Vec<_>>();
        let tensor = [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
            [8, 9],
            [10, 11],
            [12, 13],
            [14, 15],
        ];
        assert_eq!(order.groups(&[Dimension::Tensor]), pairs(&tensor));
        let data = [
            [0, 2],
            [1, 3],
            [4, 6],
            [5, 7],
            [8, 10],
            [9, 11],
            [12, 14],
            [13, 15],
        ];
        assert_eq!(order.groups(&[Dimension::Data]), pairs(&data));
        let pipeline = vec![
            vec![0, 4, 8, 12],
            vec![1, 5, 9, 13],
            vec![2, 6, 10, 14],
            vec![3, 7, 11, 15],
        ];
        assert_eq!(order.groups(&[Dimension::Pipeline]), pipeline);
        // Another order, other neighbours.
        let other = RankOrder::new("dp-tp-pp", sizes).unwrap();
        assert_eq!(other.groups(&[Dimension::Data])[0], [0, 1]);
    }

    /// Every length is another prime, so that no two dimensions can stand in for each other.
    #[test]
    fn each_dimension_has_its_own_length_and_its_own_stride() {
        let sizes = Sizes {
            tensor: 2,
            context: 3,
            expert: 5,
            data: 7,
            pipeline: 11,
        };
        let order = RankOrder::new("tp-cp-ep-dp-pp", sizes).unwrap();
        assert_eq!(order.world_size(), 2310);
        let mut stride = 1;
        for (dimension, length) in Dimension::ALL.into_iter().zip([2, 3, 5, 7, 11]) {
            let first: Vec<u32> = (0..length).map(|i| i * stride).collect();
            assert_eq!(order.groups(&[dimension])[0], first, "{dimension}");
            assert_eq!(order.coordinate(2309, dimension), Some(length - 1));
            stride *= length;
        }
    }

    #[test]
    fn a_wrong_order_says_what_is_wrong() {
        let sizes = Sizes {
            tensor: 2,
            ..Sizes::default()
        };
        for (order, sizes, says) in [
            ("tp-xx", sizes, "'xx' is not a dimension"),
            ("tp-dp-tp", sizes, "names tp twice"),
            ("dp-pp", sizes, "no place in the order"),
            ("tp", Sizes { data: 0, ..sizes }, "dp has length 0"),
            (
                "tp-dp",
                Sizes {
                    tensor: u32::MAX,
                    data: 2,
                    ..sizes
                },
                "more ranks",
            ),
        ] {
            let e = RankOrder::new(order, sizes).unwrap_err();
            assert!(e.to_string().contains(says), "{order}: {e}");
        }
    }

    proptest! {
        #[test]
        fn every_rank_is_in_one_group_of_each_kind_and_its_coordinates_say_which(
            sizes in (1u32..4, 1u32..3, 1u32..3, 1u32..4, 1u32..4),
            order in Just(Dimension::ALL.to_vec()).prop_shuffle(),
            wanted in proptest::sample::subsequence(Dimension::ALL.to_vec(), 0..=5),
        ) {
            let (tensor, context, expert, data, pipeline) = sizes;
            let sizes = Sizes { tensor, context, expert, data, pipeline };
            let names: Vec<&str> = order.iter().map(|d| d.name()).collect();
            let ranks = RankOrder::new(&names.join("-"), sizes).unwrap();
            let groups = ranks.groups(&wanted);
            let mut all: Vec<u32> = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..ranks.world_size()).collect::<Vec<_>>());
            let length: u32 = wanted.iter().map(|d| sizes.of(*d)).product();
            for group in &groups {
                prop_assert_eq!(group.len() as u32, length);
                for dimension in Dimension::ALL.iter().filter(|d| !wanted.contains(d)) {
                    let at: Vec<_> = group.iter().map(|r| ranks.coordinate(*r, *dimension)).collect();
                    prop_assert!(at.windows(2).all(|w| w[0] == w[1]));
                }
            }
            prop_assert_eq!(ranks.coordinate(ranks.world_size(), Dimension::Data), None);
        }
    }
}
