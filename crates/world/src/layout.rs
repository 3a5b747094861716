//! The groups of large-model training, as arithmetic: what Megatron's parallel state makes of the lengths of its dimensions.
//!
//! The same ranks are arranged twice in one order: for the dense layers in tensor, context, data and pipeline parallel groups, and for the experts
//! in expert-tensor, expert, expert-data and pipeline parallel groups. [`Layout::groups`] lists the groups of a [`GroupKind`];
//! [`World::layout`](crate::World::layout) makes this rank's.

use std::fmt;
use std::str::FromStr;

use ftcore::{Error, ErrorKind, Result};

use crate::Dimension::{Context, Data, Expert, Pipeline, Tensor};
use crate::{Dimension, RankOrder, Sizes};

/// What a [`Layout`] is made from. The lengths of the data parallel groups follow from the number of ranks.
///
/// ```
/// use oxccl_world::{GroupKind, Layout, LayoutSpec};
///
/// // 16 ranks: tensors split in two, two pipeline stages, so four copies of the model.
/// let spec = LayoutSpec { tensor: 2, pipeline: 2, ..LayoutSpec::default() };
/// let layout = Layout::new(16, spec)?;
/// assert_eq!(layout.group_of(5, GroupKind::Tensor)?, Some(vec![4, 5]));
/// assert_eq!(layout.group_of(5, GroupKind::Data)?, Some(vec![1, 3, 5, 7]));
/// assert_eq!(layout.group_of(5, GroupKind::Pipeline)?, Some(vec![5, 13]));
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutSpec {
    /// Tensor parallel ranks of the dense layers.
    pub tensor: u32,
    /// Context parallel ranks.
    pub context: u32,
    /// Pipeline stages.
    pub pipeline: u32,
    /// Virtual stages of each rank, for interleaved schedules.
    pub virtual_pipeline: Option<u32>,
    /// Expert parallel ranks.
    pub expert: u32,
    /// Tensor parallel ranks of the experts; as many as of the dense layers if you do not say otherwise.
    pub expert_tensor: Option<u32>,
    /// The lengths of the levels of context parallel groups, innermost first; none makes no levels. Their product is `context`.
    pub hierarchical_context: Vec<u32>,
    /// Distributed optimizers that each hold the whole state; the ranks of one share it.
    pub optimizer_instances: u32,
    /// The stages that hold the word embeddings: the first and the last if you do not say otherwise.
    pub embedding_stages: Option<Vec<u32>>,
    /// The stages that hold the position embeddings: the first if you do not say otherwise.
    pub position_embedding_stages: Option<Vec<u32>>,
    /// The dimensions in the order in which ranks are counted through them, fastest first; see [`RankOrder::new`].
    pub order: String,
    /// The rank of the world with which the layout begins.
    pub first_rank: u32,
}

impl Default for LayoutSpec {
    fn default() -> Self {
        Self {
            tensor: 1,
            context: 1,
            pipeline: 1,
            virtual_pipeline: None,
            expert: 1,
            expert_tensor: None,
            hierarchical_context: Vec::new(),
            optimizer_instances: 1,
            embedding_stages: None,
            position_embedding_stages: None,
            order: "tp-cp-ep-dp-pp".to_string(),
            first_rank: 0,
        }
    }
}

/// What the ranks of a group have in common. The names that these have as text are those of Megatron's communicators, as in its
/// files of communicator options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupKind {
    /// `tp`: parts of each matrix of the dense layers.
    Tensor,
    /// `cp`: parts of the sequence.
    Context,
    /// `pp`: the stages of one pipeline, first to last.
    Pipeline,
    /// `dp`: different batches.
    Data,
    /// `dp_cp`: what gradients are summed over.
    DataContext,
    /// `tp_cp`.
    TensorContext,
    /// `tp_dp`.
    TensorData,
    /// `tp_dp_cp`: all ranks of a stage.
    TensorDataContext,
    /// `mp`: model parallel, which is tensor and pipeline parallel: one copy of the model.
    Model,
    /// `embd`: the stages of one pipeline that hold the word embeddings.
    Embedding,
    /// `pos_embd`: those that hold the position embeddings.
    PositionEmbedding,
    /// `ep`: different experts.
    Expert,
    /// `ep_tp`: parts of each matrix of an expert.
    ExpertTensor,
    /// `tp_ep_mp`: the experts of a layer, with their parts.
    ExpertTensorModel,
    /// `tp_ep_pp`: the experts of all layers.
    ExpertTensorModelPipeline,
    /// `ep_dp`: copies of the same experts.
    ExpertData,
    /// `intra_dp_cp`: the part of `dp_cp` within one optimizer instance.
    DataContextWithin,
    /// `intra_ep_dp`: the part of `ep_dp` within one optimizer instance.
    ExpertDataWithin,
    /// `inter_ep_dp`: ranks that hold the same part of the optimizer's state in different instances.
    ExpertDataAcross,
    /// `intra_dist_opt_instance`: all ranks of one optimizer instance.
    OptimizerInstance,
    /// `hcp_0`, `hcp_1`, …: a level of the context parallel groups, the innermost first.
    HierarchicalContext(u32),
}

impl GroupKind {
    /// Those of every layout.
    const ALWAYS: [Self; 20] = [
        Self::Tensor,
        Self::Context,
        Self::Pipeline,
        Self::Data,
        Self::DataContext,
        Self::TensorContext,
        Self::TensorData,
        Self::TensorDataContext,
        Self::Model,
        Self::Embedding,
        Self::PositionEmbedding,
        Self::Expert,
        Self::ExpertTensor,
        Self::ExpertTensorModel,
        Self::ExpertTensorModelPipeline,
        Self::ExpertData,
        Self::DataContextWithin,
        Self::ExpertDataWithin,
        Self::ExpertDataAcross,
        Self::OptimizerInstance,
    ];
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tensor => "tp",
            Self::Context => "cp",
            Self::Pipeline => "pp",
            Self::Data => "dp",
            Self::DataContext => "dp_cp",
            Self::TensorContext => "tp_cp",
            Self::TensorData => "tp_dp",
            Self::TensorDataContext => "tp_dp_cp",
            Self::Model => "mp",
            Self::Embedding => "embd",
            Self::PositionEmbedding => "pos_embd",
            Self::Expert => "ep",
            Self::ExpertTensor => "ep_tp",
            Self::ExpertTensorModel => "tp_ep_mp",
            Self::ExpertTensorModelPipeline => "tp_ep_pp",
            Self::ExpertData => "ep_dp",
            Self::DataContextWithin => "intra_dp_cp",
            Self::ExpertDataWithin => "intra_ep_dp",
            Self::ExpertDataAcross => "inter_ep_dp",
            Self::OptimizerInstance => "intra_dist_opt_instance",
            Self::HierarchicalContext(level) => return write!(f, "hcp_{level}"),
        })
    }
}

impl FromStr for GroupKind {
    type Err = Error;

    /// Errors: `InvalidArgument` with the known names.
    fn from_str(name: &str) -> Result<Self> {
        if let Some(level) = name.strip_prefix("hcp_").and_then(|level| level.parse().ok()) {
            return Ok(Self::HierarchicalContext(level));
        }
        let found = Self::ALWAYS.into_iter().find(|kind| kind.to_string() == name);
        found.ok_or_else(|| {
            let known = Self::ALWAYS.map(|kind| kind.to_string()).join(", ");
            Error::invalid(format!(
                "'{name}' is not a kind of group; known: {known}, hcp_LEVEL"
            ))
        })
    }
}

/// Who is in which group. See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    spec: LayoutSpec,
    dense: RankOrder,
    experts: RankOrder,
    dense_sizes: Sizes,
    expert_sizes: Sizes,
}

impl Layout {
    /// The layout of `ranks` ranks.
    ///
    /// Errors: `InvalidArgument` says which number does not divide which and what would fit; for an order that [`RankOrder::new`] refuses, or in
    /// which the pipelines of the dense layers are not those of the experts.
    pub fn new(ranks: u32, spec: LayoutSpec) -> Result<Self> {
        let (tensor, context, pipeline, expert) = (spec.tensor, spec.context, spec.pipeline, spec.expert);
        let expert_tensor = spec.expert_tensor.unwrap_or(tensor);
        let instances = spec.optimizer_instances;
        let data = quotient("dp", ranks, &[("tp", tensor), ("cp", context), ("pp", pipeline)])?;
        let expert_data = quotient(
            "the experts' dp",
            ranks,
            &[
                ("the experts' tp", expert_tensor),
                ("ep", expert),
                ("pp", pipeline),
            ],
        )?;
        let dense_sizes = Sizes {
            tensor,
            context,
            data,
            pipeline,
            expert: 1,
        };
        let expert_sizes = Sizes {
            tensor: expert_tensor,
            context: 1,
            expert,
            data: expert_data,
            pipeline,
        };
        let layout = Self {
            dense: RankOrder::new(&spec.order, dense_sizes)?,
            experts: RankOrder::new(&spec.order, expert_sizes)?,
            spec,
            dense_sizes,
            expert_sizes,
        };
        layout.check_pipelines()?;
        let gradients = data.saturating_mul(context);
        for (what, length) in [("dp × cp", gradients), ("the experts' dp", expert_data)] {
            if instances == 0 || length % instances != 0 {
                return Err(Error::invalid(format!(
                    "{instances} optimizer instances do not divide {what}, which is {length}; {} would",
                    divisors(length)
                )));
            }
        }
        layout.check_levels()?;
        layout.check_stages()?;
        let end = layout.spec.first_rank.checked_add(ranks);
        end.ok_or_else(|| Error::invalid("more ranks than a u32 can count"))?;
        Ok(layout)
    }

    /// A rank has one place in the pipeline, whichever layers it is asked for.
    fn check_pipelines(&self) -> Result<()> {
        let strides = (self.dense.stride(Pipeline), self.experts.stride(Pipeline));
        if self.spec.pipeline == 1 || strides.0 == strides.1 {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "in the order '{}', neighbours in a pipeline are {} ranks apart for the dense layers and {} for the experts; \
             put pp last, or make what stands before it of equal length for both",
            self.spec.order, strides.0, strides.1
        )))
    }

    fn check_levels(&self) -> Result<()> {
        let levels = &self.spec.hierarchical_context;
        let product = levels.iter().try_fold(1u32, |product, l| product.checked_mul(*l));
        if levels.is_empty() || product == Some(self.spec.context) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the levels of the context parallel groups, {}, do not multiply to cp, which is {}",
            product_of(levels),
            self.spec.context
        )))
    }

    fn check_stages(&self) -> Result<()> {
        let pipeline = self.spec.pipeline;
        if let Some(stages) = self.spec.virtual_pipeline
            && (pipeline == 1 || stages == 0)
        {
            return Err(Error::invalid(format!(
                "{stages} virtual stages on each rank of a pipeline of {pipeline}: a rank has at least 1, and a pipeline with virtual stages has \
                 at least 2 ranks"
            )));
        }
        for (what, stages) in [
            ("word", &self.spec.embedding_stages),
            ("position", &self.spec.position_embedding_stages),
        ] {
            let stages = stages.as_deref().unwrap_or(&[0]);
            let ascending = stages.iter().zip(stages.iter().skip(1)).all(|(a, b)| a < b);
            if stages.is_empty() || !ascending || stages.iter().any(|stage| *stage >= pipeline) {
                return Err(Error::invalid(format!(
                    "the stages with {what} embeddings are {stages:?}; they are at least one, ascending, and below pp, which is {pipeline}"
                )));
            }
        }
        Ok(())
    }

    /// What it was made from.
    pub fn spec(&self) -> &LayoutSpec {
        &self.spec
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.dense.world_size()
    }

    /// The lengths of the dense layers' dimensions.
    pub fn dense_sizes(&self) -> Sizes {
        self.dense_sizes
    }

    /// The lengths of the experts' dimensions.
    pub fn expert_sizes(&self) -> Sizes {
        self.expert_sizes
    }

    /// The kinds of group that it has.
    pub fn kinds(&self) -> Vec<GroupKind> {
        let levels = (0..).zip(&self.spec.hierarchical_context);
        let levels = levels.map(|(level, _)| GroupKind::HierarchicalContext(level));
        GroupKind::ALWAYS.into_iter().chain(levels).collect()
    }

    /// All groups of this kind, each in ascending order. Every rank is in exactly one, except of the embeddings', which only some stages are in.
    ///
    /// Errors: `NotFound` for a level of the context parallel groups that there is not.
    pub fn groups(&self, kind: GroupKind) -> Result<Vec<Vec<u32>>> {
        let dense = |along: &[Dimension]| self.dense.groups(along);
        let experts = |along: &[Dimension]| self.experts.groups(along);
        let instances = self.spec.optimizer_instances;
        let mut groups = match kind {
            GroupKind::Tensor => dense(&[Tensor]),
            GroupKind::Context => dense(&[Context]),
            GroupKind::Pipeline => dense(&[Pipeline]),
            GroupKind::Data => dense(&[Data]),
            GroupKind::DataContext => dense(&[Data, Context]),
            GroupKind::TensorContext => dense(&[Tensor, Context]),
            GroupKind::TensorData => dense(&[Tensor, Data]),
            GroupKind::TensorDataContext => dense(&[Tensor, Data, Context]),
            GroupKind::Model => dense(&[Tensor, Pipeline]),
            GroupKind::Embedding => self.stages(self.spec.embedding_stages.as_deref(), true),
            GroupKind::PositionEmbedding => {
                self.stages(self.spec.position_embedding_stages.as_deref(), false)
            }
            GroupKind::Expert => experts(&[Expert]),
            GroupKind::ExpertTensor => experts(&[Tensor]),
            GroupKind::ExpertTensorModel => experts(&[Tensor, Expert]),
            GroupKind::ExpertTensorModelPipeline => experts(&[Tensor, Expert, Pipeline]),
            GroupKind::ExpertData => experts(&[Data]),
            GroupKind::DataContextWithin => {
                let length = self.dense_sizes.data * self.dense_sizes.context / instances;
                level(&dense(&[Data, Context]), 1, length)
            }
            GroupKind::ExpertDataWithin => level(&experts(&[Data]), 1, self.shared()),
            GroupKind::ExpertDataAcross => level(&experts(&[Data]), self.shared(), instances),
            GroupKind::OptimizerInstance => self.optimizer_instances(),
            GroupKind::HierarchicalContext(n) => {
                let levels = &self.spec.hierarchical_context;
                let Some(length) = levels.get(n as usize) else {
                    return Err(Error::new(
                        ErrorKind::NotFound,
                        format!(
                            "the context parallel groups have {} levels, no {kind}",
                            levels.len()
                        ),
                    ));
                };
                let inner = levels.iter().take(n as usize).product();
                level(&dense(&[Context]), inner, *length)
            }
        };
        groups
            .iter_mut()
            .flatten()
            .for_each(|rank| *rank += self.spec.first_rank);
        Ok(groups)
    }

    /// The group of this kind that `rank` is in; `None` if it is in none.
    ///
    /// Errors: as [`groups`](Self::groups).
    pub fn group_of(&self, rank: u32, kind: GroupKind) -> Result<Option<Vec<u32>>> {
        let groups = self.groups(kind)?;
        Ok(groups.into_iter().find(|group| group.contains(&rank)))
    }

    /// The stages of `rank`, of which there are as many as pipeline ranks times virtual stages: a rank has every `pipeline`-th. Empty for a
    /// rank that is not in the layout.
    pub fn stages_of(&self, rank: u32) -> Vec<u32> {
        let Some(first) = self.stage(rank) else {
            return Vec::new();
        };
        let rounds = self.spec.virtual_pipeline.unwrap_or(1);
        (0..rounds).map(|n| n * self.spec.pipeline + first).collect()
    }

    /// The rank before and the rank after `rank` in its pipeline, which is a ring: the last stage goes before the first, as interleaved
    /// schedules need. `None` for a rank that is not in the layout.
    pub fn pipeline_neighbours(&self, rank: u32) -> Option<(u32, u32)> {
        let (stage, length) = (self.stage(rank)?, self.spec.pipeline);
        let stride = self.dense.stride(Pipeline);
        let start = rank - stage * stride;
        let at = |stage: u32| start + stage % length * stride;
        Some((at(stage + length - 1), at(stage + 1)))
    }

    /// The place of `rank` in its pipeline.
    fn stage(&self, rank: u32) -> Option<u32> {
        let place = rank.checked_sub(self.spec.first_rank)?;
        self.dense.coordinate(place, Pipeline)
    }

    /// Ranks of each pipeline at these stages; without them, of the first one, and of the last one if that counts, too.
    fn stages(&self, stages: Option<&[u32]>, last: bool) -> Vec<Vec<u32>> {
        let end = self.spec.pipeline - 1;
        let usual = if last && end > 0 { vec![0, end] } else { vec![0] };
        let wanted = stages.unwrap_or(&usual);
        let chosen = |pipeline: &Vec<u32>| {
            let ranks = wanted.iter().filter_map(|stage| pipeline.get(*stage as usize));
            ranks.copied().collect()
        };
        self.dense.groups(&[Pipeline]).iter().map(chosen).collect()
    }

    /// Copies of an expert within one optimizer instance.
    fn shared(&self) -> u32 {
        self.expert_sizes.data / self.spec.optimizer_instances
    }

    fn optimizer_instances(&self) -> Vec<Vec<u32>> {
        let mut instances = vec![Vec::new(); self.spec.optimizer_instances as usize];
        for rank in 0..self.size() {
            let copy = self.experts.coordinate(rank, Data).unwrap_or(0);
            if let Some(instance) = instances.get_mut((copy / self.shared()) as usize) {
                instance.push(rank);
            }
        }
        instances
    }
}

/// Each group cut into groups of `length` ranks that are `stride` apart in it.
fn level(groups: &[Vec<u32>], stride: u32, length: u32) -> Vec<Vec<u32>> {
    let (stride, length) = (stride as usize, length as usize);
    let cut = |block: &[u32]| -> Vec<Vec<u32>> {
        let every = |start| block.iter().skip(start).step_by(stride).copied().collect();
        (0..stride).map(every).collect()
    };
    groups
        .iter()
        .flat_map(|group| group.chunks(stride * length).flat_map(cut))
        .collect()
}

/// `ranks` divided by the product of `lengths`, which is the length `of` a dimension.
fn quotient(of: &str, ranks: u32, lengths: &[(&str, u32)]) -> Result<u32> {
    for (name, length) in lengths {
        if *length == 0 {
            return Err(Error::invalid(format!(
                "{name} has length 0; 1 means that nothing is split"
            )));
        }
    }
    // Three lengths fit.
    let product: u128 = lengths.iter().map(|(_, length)| u128::from(*length)).product();
    let ranks = u128::from(ranks);
    if ranks > 0 && ranks.is_multiple_of(product) {
        return u32::try_from(ranks / product).map_err(|_| Error::invalid("more ranks than a u32 can count"));
    }
    let named: Vec<String> = lengths
        .iter()
        .map(|(name, length)| format!("{name} {length}"))
        .collect();
    let below = ranks - ranks % product;
    let sizes = match below {
        0 => format!("{product} ranks"),
        below => format!("{below} or {} ranks", below + product),
    };
    // What one of them could be if the others stay.
    let others: Vec<String> = lengths
        .iter()
        .filter_map(|(name, length)| {
            let rest = product / u128::from(*length);
            let fits = ranks > 0 && ranks.is_multiple_of(rest);
            fits.then(|| u32::try_from(ranks / rest).map(|n| format!("{name} {}", divisors(n))))
        })
        .flatten()
        .collect();
    let others = match others.as_slice() {
        [] => String::new(),
        others => format!("; or, the others being as they are: {}", others.join(", or ")),
    };
    Err(Error::invalid(format!(
        "{ranks} ranks do not divide into {} = {product}, so that {of} has no length; {sizes} would{others}",
        named.join(" × ")
    )))
}

/// The divisors of `n` as text, the first few of many.
fn divisors(n: u32) -> String {
    const SHOWN: usize = 12;
    let small = (1..).take_while(|d| u64::from(*d) * u64::from(*d) <= u64::from(n));
    let mut all: Vec<u32> = small
        .filter(|d| n.is_multiple_of(*d))
        .flat_map(|d| [d, n / d])
        .collect();
    all.sort_unstable();
    all.dedup();
    let more = if all.len() > SHOWN { " or more" } else { "" };
    let shown: Vec<String> = all.iter().take(SHOWN).map(u32::to_string).collect();
    match shown.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) if more.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => format!("{}{more}", shown.join(", ")),
    }
}

fn product_of(lengths: &[u32]) -> String {
    let texts: Vec<String> = lengths.iter().map(u32::to_string).collect();
    texts.join(" × ")
}
