//! Who is in which group of a layout: tables worked out by hand for published shapes, and what holds for every shape.
//!
//! Over 800 lines because the tables are written out, one published shape after another.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeSet;

use ftcore::ErrorKind;
use oxccl_world::{Dimension, GroupKind, Layout, LayoutSpec};
use proptest::prelude::*;

/// Ranks from `first` on, `stride` apart.
fn run(first: u32, stride: u32, count: u32) -> Vec<u32> {
    (0..count).map(|n| first + n * stride).collect()
}

/// Ranks next to each other.
fn row(first: u32, count: u32) -> Vec<u32> {
    run(first, 1, count)
}

/// `count` rows of `length` ranks, `stride` apart.
fn rows(first: u32, length: u32, stride: u32, count: u32) -> Vec<u32> {
    run(first, stride, count)
        .into_iter()
        .flat_map(|f| row(f, length))
        .collect()
}

fn dense(tensor: u32, context: u32, pipeline: u32) -> LayoutSpec {
    LayoutSpec {
        tensor,
        context,
        pipeline,
        ..LayoutSpec::default()
    }
}

fn layout(ranks: u32, spec: LayoutSpec) -> Layout {
    Layout::new(ranks, spec).unwrap()
}

/// All groups of each of these kinds.
#[track_caller]
fn all_groups(layout: &Layout, wanted: &[(&str, &[&[u32]])]) {
    for (kind, groups) in wanted {
        assert_eq!(layout.groups(kind.parse().unwrap()).unwrap(), *groups, "{kind}");
    }
}

/// The groups of these kinds that `rank` is in.
#[track_caller]
fn groups_of(layout: &Layout, rank: u32, wanted: &[(&str, Vec<u32>)]) {
    for (kind, group) in wanted {
        let found = layout.group_of(rank, kind.parse().unwrap()).unwrap();
        assert_eq!(found.as_ref(), Some(group), "{kind} of rank {rank}");
    }
}

/// Megatron-LM, `megatron/core/parallel_state.py`, the example of `initialize_model_parallel`: 16 GPUs, tensor 2, pipeline 4.
#[test]
fn megatron_16_gpus() {
    let layout = layout(16, dense(2, 1, 4));
    assert_eq!(layout.dense_sizes().data, 2);
    all_groups(
        &layout,
        &[
            (
                "tp",
                &[
                    &[0, 1],
                    &[2, 3],
                    &[4, 5],
                    &[6, 7],
                    &[8, 9],
                    &[10, 11],
                    &[12, 13],
                    &[14, 15],
                ],
            ),
            (
                "dp",
                &[
                    &[0, 2],
                    &[1, 3],
                    &[4, 6],
                    &[5, 7],
                    &[8, 10],
                    &[9, 11],
                    &[12, 14],
                    &[13, 15],
                ],
            ),
            (
                "pp",
                &[&[0, 4, 8, 12], &[1, 5, 9, 13], &[2, 6, 10, 14], &[3, 7, 11, 15]],
            ),
            (
                "mp",
                &[&[0, 1, 4, 5, 8, 9, 12, 13], &[2, 3, 6, 7, 10, 11, 14, 15]],
            ),
            ("embd", &[&[0, 12], &[1, 13], &[2, 14], &[3, 15]]),
            ("pos_embd", &[&[0], &[1], &[2], &[3]]),
            (
                "tp_dp",
                &[&[0, 1, 2, 3], &[4, 5, 6, 7], &[8, 9, 10, 11], &[12, 13, 14, 15]],
            ),
        ],
    );
    assert_eq!(layout.group_of(5, GroupKind::Embedding).unwrap(), None);
}

/// The same file, `context_parallel_size`: 8 GPUs, tensor 4, context 2.
#[test]
fn megatron_8_gpus_with_context() {
    all_groups(
        &layout(8, dense(4, 2, 1)),
        &[
            ("cp", &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]),
            ("tp", &[&[0, 1, 2, 3], &[4, 5, 6, 7]]),
            ("dp", &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]]),
            ("dp_cp", &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]),
            ("tp_cp", &[&[0, 1, 2, 3, 4, 5, 6, 7]]),
            ("tp_dp", &[&[0, 1, 2, 3], &[4, 5, 6, 7]]),
            ("tp_dp_cp", &[&[0, 1, 2, 3, 4, 5, 6, 7]]),
        ],
    );
}

/// The same file, `virtual_pipeline_model_parallel_size`: pipeline 4, two virtual stages, 16 layers in 8 stages of 2.
#[test]
fn megatron_virtual_stages() {
    let spec = LayoutSpec {
        virtual_pipeline: Some(2),
        ..dense(1, 1, 4)
    };
    let layout = layout(4, spec);
    // Counted from 1 there.
    let layers = |rank| -> Vec<[u32; 2]> {
        let stages = layout.stages_of(rank);
        stages
            .iter()
            .map(|stage| [stage * 2 + 1, stage * 2 + 2])
            .collect()
    };
    assert_eq!(layers(0), [[1, 2], [9, 10]]);
    assert_eq!(layers(1), [[3, 4], [11, 12]]);
    assert_eq!(layers(2), [[5, 6], [13, 14]]);
    assert_eq!(layers(3), [[7, 8], [15, 16]]);
    assert_eq!(layout.stages_of(4), [0; 0]);
}

/// The same file, `create_hierarchical_groups`: 16 GPUs in levels of 2, 2 and 4.
#[test]
fn megatron_levels_of_context() {
    let spec = LayoutSpec {
        hierarchical_context: vec![2, 2, 4],
        ..dense(1, 16, 1)
    };
    let layout = layout(16, spec);
    all_groups(
        &layout,
        &[
            (
                "hcp_0",
                &[
                    &[0, 1],
                    &[2, 3],
                    &[4, 5],
                    &[6, 7],
                    &[8, 9],
                    &[10, 11],
                    &[12, 13],
                    &[14, 15],
                ],
            ),
            (
                "hcp_1",
                &[
                    &[0, 2],
                    &[1, 3],
                    &[4, 6],
                    &[5, 7],
                    &[8, 10],
                    &[9, 11],
                    &[12, 14],
                    &[13, 15],
                ],
            ),
            (
                "hcp_2",
                &[&[0, 4, 8, 12], &[1, 5, 9, 13], &[2, 6, 10, 14], &[3, 7, 11, 15]],
            ),
        ],
    );
    assert_eq!(layout.kinds().len(), 23);
    let e = layout.groups(GroupKind::HierarchicalContext(3)).unwrap_err();
    assert!(e.to_string().contains("3 levels, no hcp_3"), "{e}");
}

/// The same file, `generate_masked_orthogonal_rank_groups`: tensor 2, pipeline 2, data 2 in the order tp-pp-dp.
#[test]
fn megatron_8_gpus_with_data_last() {
    let spec = LayoutSpec {
        order: "tp-pp-dp".into(),
        ..dense(2, 1, 2)
    };
    all_groups(
        &layout(8, spec),
        &[
            ("dp", &[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]),
            ("pp", &[&[0, 2], &[1, 3], &[4, 6], &[5, 7]]),
            ("mp", &[&[0, 1, 2, 3], &[4, 5, 6, 7]]),
        ],
    );
}

/// The same function: tensor 2, data 3, pipeline 4.
#[test]
fn megatron_24_gpus() {
    let layout = layout(24, dense(2, 1, 4));
    let data = layout.groups(GroupKind::Data).unwrap();
    assert_eq!(data.len(), 8);
    assert_eq!(
        [&data[0], &data[1], &data[2], &data[7]],
        [&[0, 2, 4], &[1, 3, 5], &[6, 8, 10], &[19, 21, 23]]
    );
}

/// "The Llama 3 Herd of Models", figure 5: 16 GPUs in the order [TP, CP, PP, DP], 2 in each; GPU 0 has GPU 1, 2, 4 and 8 beside it.
#[test]
fn llama_3_16_gpus() {
    let spec = LayoutSpec {
        order: "tp-cp-pp-dp".into(),
        // The paper's model has no experts; this many have the same pipelines.
        expert_tensor: Some(4),
        ..dense(2, 2, 2)
    };
    all_groups(
        &layout(16, spec),
        &[
            (
                "tp",
                &[
                    &[0, 1],
                    &[2, 3],
                    &[4, 5],
                    &[6, 7],
                    &[8, 9],
                    &[10, 11],
                    &[12, 13],
                    &[14, 15],
                ],
            ),
            (
                "cp",
                &[
                    &[0, 2],
                    &[1, 3],
                    &[4, 6],
                    &[5, 7],
                    &[8, 10],
                    &[9, 11],
                    &[12, 14],
                    &[13, 15],
                ],
            ),
            (
                "pp",
                &[
                    &[0, 4],
                    &[1, 5],
                    &[2, 6],
                    &[3, 7],
                    &[8, 12],
                    &[9, 13],
                    &[10, 14],
                    &[11, 15],
                ],
            ),
            (
                "dp",
                &[
                    &[0, 8],
                    &[1, 9],
                    &[2, 10],
                    &[3, 11],
                    &[4, 12],
                    &[5, 13],
                    &[6, 14],
                    &[7, 15],
                ],
            ),
            (
                "dp_cp",
                &[&[0, 2, 8, 10], &[1, 3, 9, 11], &[4, 6, 12, 14], &[5, 7, 13, 15]],
            ),
        ],
    );
}

/// Megatron-LM, `docs/user-guide/parallelism-guide.md`, recommended configurations: LLaMA-3 8B, 8 GPUs, context 2.
#[test]
fn llama_3_8b() {
    all_groups(
        &layout(8, dense(1, 2, 1)),
        &[
            ("cp", &[&[0, 1], &[2, 3], &[4, 5], &[6, 7]]),
            ("dp", &[&[0, 2, 4, 6], &[1, 3, 5, 7]]),
            ("dp_cp", &[&[0, 1, 2, 3, 4, 5, 6, 7]]),
            ("ep_dp", &[&[0, 1, 2, 3, 4, 5, 6, 7]]),
        ],
    );
}

/// The same table: LLaMA-3 70B, 64 GPUs, tensor 4, context 2, pipeline 4; so data 2, and 16 ranks in a stage. Rank 37 = 2·16 + 0·8 + 1·4 + 1.
#[test]
fn llama_3_70b() {
    let layout = layout(64, dense(4, 2, 4));
    groups_of(
        &layout,
        37,
        &[
            ("tp", vec![36, 37, 38, 39]),
            ("cp", vec![33, 37]),
            ("dp", vec![37, 45]),
            ("dp_cp", vec![33, 37, 41, 45]),
            ("tp_cp", row(32, 8)),
            ("tp_dp", vec![36, 37, 38, 39, 44, 45, 46, 47]),
            ("tp_dp_cp", row(32, 16)),
            ("pp", vec![5, 21, 37, 53]),
            (
                "mp",
                vec![4, 5, 6, 7, 20, 21, 22, 23, 36, 37, 38, 39, 52, 53, 54, 55],
            ),
        ],
    );
    assert_eq!(layout.group_of(37, GroupKind::Embedding).unwrap(), None);
    groups_of(&layout, 53, &[("embd", vec![5, 53])]);
    groups_of(&layout, 5, &[("embd", vec![5, 53]), ("pos_embd", vec![5])]);
    assert_eq!(layout.pipeline_neighbours(37), Some((21, 53)));
    assert_eq!(layout.pipeline_neighbours(53), Some((37, 5)));
}

/// The same table: LLaMA-3.1 405B, 1024 GPUs, tensor 8, context 2, pipeline 8; so data 8, and 128 ranks in a stage. Rank 515 = 4·128 + 3.
#[test]
fn llama_3_405b() {
    groups_of(
        &layout(1024, dense(8, 2, 8)),
        515,
        &[
            ("tp", row(512, 8)),
            ("cp", vec![515, 523]),
            ("dp", run(515, 16, 8)),
            ("dp_cp", run(515, 8, 16)),
            ("pp", run(3, 128, 8)),
        ],
    );
}

/// The same table: GPT-3 175B on 128 GPUs, tensor 4, pipeline 8; so data 4, and 16 ranks in a stage.
#[test]
fn gpt_3_175b() {
    groups_of(
        &layout(128, dense(4, 1, 8)),
        127,
        &[
            ("tp", vec![124, 125, 126, 127]),
            ("dp", vec![115, 119, 123, 127]),
            ("pp", vec![15, 31, 47, 63, 79, 95, 111, 127]),
            ("embd", vec![15, 127]),
        ],
    );
}

/// The same guide: Mixtral 8x7B, 64 GPUs, pipeline 4, expert 8; so data 16, two copies of each expert. Rank 21 = 16 + 5.
#[test]
fn mixtral_8x7b() {
    let spec = LayoutSpec {
        expert: 8,
        ..dense(1, 1, 4)
    };
    let layout = layout(64, spec);
    assert_eq!(layout.expert_sizes().data, 2);
    groups_of(
        &layout,
        21,
        &[
            ("dp", row(16, 16)),
            ("ep", row(16, 8)),
            ("ep_tp", vec![21]),
            ("ep_dp", vec![21, 29]),
            ("pp", vec![5, 21, 37, 53]),
            ("tp_ep_pp", rows(0, 8, 16, 4)),
        ],
    );
}

/// The same guide: Mixtral 8x22B, 256 GPUs, tensor 4, pipeline 4, expert 8; so 64 ranks in a stage. Rank 200 = 3·64 + 2·4.
#[test]
fn mixtral_8x22b() {
    let spec = LayoutSpec {
        expert: 8,
        ..dense(4, 1, 4)
    };
    let layout = layout(256, spec);
    assert_eq!((layout.dense_sizes().data, layout.expert_sizes().data), (16, 2));
    groups_of(
        &layout,
        200,
        &[
            ("tp", vec![200, 201, 202, 203]),
            ("ep_tp", vec![200, 201, 202, 203]),
            ("dp", run(192, 4, 16)),
            ("ep", run(192, 4, 8)),
            ("tp_ep_mp", row(192, 32)),
            ("ep_dp", vec![200, 232]),
            ("tp_ep_pp", rows(0, 32, 64, 4)),
        ],
    );
}

/// The same guide: DeepSeek-V3, 1024 GPUs, tensor 2, pipeline 16, expert 64; so 64 ranks in a stage, which hold each expert once, and one
/// rank must hold a whole expert. Rank 130 = 2·64 + 2.
#[test]
fn deepseek_v3() {
    let spec = LayoutSpec {
        expert: 64,
        expert_tensor: Some(1),
        ..dense(2, 1, 16)
    };
    let whole = layout(1024, spec.clone());
    groups_of(
        &whole,
        130,
        &[
            ("tp", vec![130, 131]),
            ("dp", run(128, 2, 32)),
            ("ep", row(128, 64)),
            ("ep_tp", vec![130]),
            ("ep_dp", vec![130]),
            ("tp_ep_pp", row(0, 1024)),
            ("pp", run(2, 64, 16)),
        ],
    );
    let spec = LayoutSpec {
        expert_tensor: None,
        ..spec
    };
    let e = Layout::new(1024, spec).unwrap_err().to_string();
    assert!(e.contains("the experts' tp 2 × ep 64 × pp 16 = 2048"), "{e}");
    assert!(
        e.contains("the experts' tp 1, or ep 1, 2, 4, 8, 16 or 32, or pp 1, 2, 4 or 8"),
        "{e}"
    );
}

/// Megatron-LM, `megatron/core/transformer/moe/README.md`, parallel folding: tensor 4, context 2, data 8, pipeline 4 for the dense layers; expert 64
/// with whole experts. Rank 77 = 64 + 8 + 4 + 1.
#[test]
fn parallel_folding() {
    let spec = LayoutSpec {
        expert: 64,
        expert_tensor: Some(1),
        ..dense(4, 2, 4)
    };
    let layout = layout(256, spec);
    assert_eq!((layout.dense_sizes().data, layout.expert_sizes().data), (8, 1));
    groups_of(
        &layout,
        77,
        &[
            ("tp", vec![76, 77, 78, 79]),
            ("cp", vec![73, 77]),
            ("dp", vec![69, 77, 85, 93, 101, 109, 117, 125]),
            ("ep", row(64, 64)),
            ("pp", vec![13, 77, 141, 205]),
        ],
    );
}

/// NVIDIA's benchmark recipe of Nemotron-4 340B: 256 GPUs, tensor 8, pipeline 8, 12 virtual stages, 96 layers; so data 4, one layer in a stage.
/// Rank 100 = 3·32 + 4.
#[test]
fn nemotron_4_340b() {
    let spec = LayoutSpec {
        virtual_pipeline: Some(12),
        ..dense(8, 1, 8)
    };
    let layout = layout(256, spec);
    assert_eq!(
        layout.stages_of(100),
        [3, 11, 19, 27, 35, 43, 51, 59, 67, 75, 83, 91]
    );
    assert_eq!(layout.stages_of(255), run(7, 8, 12));
    assert_eq!(layout.pipeline_neighbours(100), Some((68, 132)));
    assert_eq!(layout.pipeline_neighbours(228), Some((196, 4)));
    groups_of(
        &layout,
        100,
        &[("dp", vec![100, 108, 116, 124]), ("tp", row(96, 8))],
    );
}

/// "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", table 1, the last row: 3072 GPUs, tensor 8, pipeline 64;
/// so data 6, and 48 ranks in a stage. Rank 1000 = 20·48 + 5·8.
#[test]
fn megatron_1t() {
    groups_of(
        &layout(3072, dense(8, 1, 64)),
        1000,
        &[
            ("tp", row(1000, 8)),
            ("dp", vec![960, 968, 976, 984, 992, 1000]),
            ("pp", run(40, 48, 64)),
            ("tp_dp", row(960, 48)),
        ],
    );
}

/// 16 ranks, tensor 2, pipeline 2, whole experts on 2: the dense layers have 4 copies, as the experts have, two in each instance.
#[test]
fn optimizer_instances_share_nothing() {
    let spec = LayoutSpec {
        expert: 2,
        expert_tensor: Some(1),
        optimizer_instances: 2,
        ..dense(2, 1, 2)
    };
    let layout = layout(16, spec);
    groups_of(
        &layout,
        11,
        &[
            ("dp_cp", vec![9, 11, 13, 15]),
            ("intra_dp_cp", vec![9, 11]),
            ("ep", vec![10, 11]),
            ("ep_dp", vec![9, 11, 13, 15]),
            ("intra_ep_dp", vec![9, 11]),
            ("inter_ep_dp", vec![11, 15]),
            ("intra_dist_opt_instance", vec![0, 1, 2, 3, 8, 9, 10, 11]),
        ],
    );
}

/// Ranks before the layout are in none of its groups.
#[test]
fn a_layout_may_begin_at_another_rank() {
    let spec = LayoutSpec {
        first_rank: 10,
        ..dense(2, 1, 2)
    };
    let layout = layout(4, spec);
    all_groups(
        &layout,
        &[("tp", &[&[10, 11], &[12, 13]]), ("pp", &[&[10, 12], &[11, 13]])],
    );
    assert_eq!(layout.group_of(9, GroupKind::Tensor).unwrap(), None);
    assert_eq!(layout.stages_of(13), [1]);
    assert_eq!(layout.pipeline_neighbours(13), Some((11, 11)));
    assert_eq!(layout.pipeline_neighbours(14), None);
}

#[test]
fn the_stages_with_embeddings_may_be_named() {
    let spec = LayoutSpec {
        embedding_stages: Some(vec![0, 2, 3]),
        position_embedding_stages: Some(vec![0, 2]),
        ..dense(1, 1, 4)
    };
    all_groups(
        &layout(4, spec),
        &[("embd", &[&[0, 2, 3]]), ("pos_embd", &[&[0, 2]])],
    );
}

/// Llama 3's cluster has 24K GPUs; tensor 8, pipeline 16 as in the paper's table of configurations, with experts to have the other kinds, too.
#[test]
fn twenty_four_thousand_ranks() {
    let spec = LayoutSpec {
        expert: 8,
        expert_tensor: Some(1),
        hierarchical_context: vec![2, 2],
        optimizer_instances: 2,
        ..dense(8, 4, 16)
    };
    let begun = std::time::Instant::now();
    let layout = layout(24_576, spec);
    let kinds = layout.kinds();
    let lists: Vec<_> = kinds.iter().map(|kind| layout.groups(*kind).unwrap()).collect();
    println!("{} kinds of group in {:?}", kinds.len(), begun.elapsed());
    let count = |kind: GroupKind| lists[kinds.iter().position(|k| *k == kind).unwrap()].len();
    assert_eq!(count(GroupKind::Tensor), 3072);
    assert_eq!(count(GroupKind::Pipeline), 1536);
    assert_eq!(count(GroupKind::OptimizerInstance), 2);
    for (kind, groups) in kinds.iter().zip(&lists) {
        let all: BTreeSet<u32> = groups.iter().flatten().copied().collect();
        let wanted = match kind {
            GroupKind::Embedding => 3072,
            GroupKind::PositionEmbedding => 1536,
            _ => 24_576,
        };
        assert_eq!(all.len(), wanted, "{kind}");
    }
}

#[test]
fn what_does_not_fit_is_named_with_what_would() {
    let spec = dense(2, 1, 2);
    for (ranks, spec, says) in [
        (
            16,
            dense(3, 1, 2),
            "16 ranks do not divide into tp 3 × cp 1 × pp 2 = 6, so that dp has no length; 12 or 18 ranks would; \
             or, the others being as they are: tp 1, 2, 4 or 8",
        ),
        (4, dense(8, 1, 1), "= 8, so that dp has no length; 8 ranks would"),
        (0, dense(1, 1, 1), "0 ranks"),
        (8, dense(0, 1, 1), "tp has length 0"),
        (8, dense(u32::MAX, u32::MAX, u32::MAX), "ranks would"),
        (
            8,
            LayoutSpec {
                expert: 3,
                ..spec.clone()
            },
            "the experts' tp 2 × ep 3 × pp 2 = 12, so that the experts' dp has no length; 12 ranks would; \
             or, the others being as they are: ep 1 or 2",
        ),
        (
            24,
            LayoutSpec {
                optimizer_instances: 4,
                ..spec.clone()
            },
            "4 optimizer instances do not divide dp × cp, which is 6; 1, 2, 3 or 6 would",
        ),
        (
            24,
            LayoutSpec {
                optimizer_instances: 3,
                expert: 3,
                ..spec.clone()
            },
            "3 optimizer instances do not divide the experts' dp, which is 2; 1 or 2 would",
        ),
        (
            16,
            LayoutSpec {
                hierarchical_context: vec![2, 3],
                ..dense(1, 8, 1)
            },
            "2 × 3, do not multiply to cp, which is 8",
        ),
        (
            4,
            LayoutSpec {
                virtual_pipeline: Some(2),
                ..dense(2, 1, 1)
            },
            "2 virtual stages on each rank of a pipeline of 1",
        ),
        (
            4,
            LayoutSpec {
                embedding_stages: Some(vec![0, 2]),
                ..spec.clone()
            },
            "word embeddings are [0, 2]; they are at least one, ascending, and below pp, which is 2",
        ),
        (
            16,
            LayoutSpec {
                expert: 2,
                order: "tp-cp-ep-pp-dp".into(),
                ..spec.clone()
            },
            "neighbours in a pipeline are 2 ranks apart for the dense layers and 4 for the experts; put pp last",
        ),
        (
            8,
            LayoutSpec {
                order: "tp-xx-pp".into(),
                ..spec.clone()
            },
            "'xx' is not a dimension",
        ),
    ] {
        let e = Layout::new(ranks, spec).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains(says), "{e}");
    }
}

#[test]
fn kinds_have_the_names_of_megatrons_communicators() {
    let names: Vec<GroupKind> = ["tp", "dp_cp", "mp", "intra_dist_opt_instance", "hcp_12"]
        .iter()
        .map(|name| name.parse().unwrap())
        .collect();
    let kinds = [
        GroupKind::Tensor,
        GroupKind::DataContext,
        GroupKind::Model,
        GroupKind::OptimizerInstance,
        GroupKind::HierarchicalContext(12),
    ];
    assert_eq!(names, kinds);
    for kind in layout(1, dense(1, 1, 1)).kinds() {
        assert_eq!(kind.to_string().parse::<GroupKind>().unwrap(), kind);
    }
    let e = "dpcp".parse::<GroupKind>().unwrap_err().to_string();
    assert!(
        e.contains("'dpcp' is not a kind of group; known: tp, cp, pp, dp, dp_cp"),
        "{e}"
    );
}

/// A length and one of its divisors, by number.
fn divisor(of: u32, number: usize) -> u32 {
    let all: Vec<u32> = (1..=of).filter(|d| of.is_multiple_of(*d)).collect();
    all[number % all.len()]
}

prop_compose! {
    fn shapes()(
        lengths in (1u32..4, 1u32..4, 1u32..4, 1u32..5),
        numbers in (0usize..8, 0usize..8, 0usize..8, 0usize..8),
        order in Just(Dimension::ALL.to_vec()).prop_shuffle(),
        pipeline_last in prop::bool::weighted(0.7),
    ) -> (u32, LayoutSpec) {
        let (tensor, context, pipeline, data) = lengths;
        let stage = tensor * context * data;
        let expert_tensor = divisor(stage, numbers.0);
        let expert = divisor(stage / expert_tensor, numbers.1);
        let copies = stage / expert_tensor / expert;
        let level = divisor(context, numbers.3);
        let mut names: Vec<&str> = order.iter().map(|d| d.name()).collect();
        if pipeline_last {
            names.retain(|name| *name != "pp");
            names.push("pp");
        }
        let both: Vec<u32> = (1..=copies).filter(|n| copies.is_multiple_of(*n) && (data * context).is_multiple_of(*n)).collect();
        let spec = LayoutSpec {
            tensor,
            context,
            pipeline,
            expert,
            expert_tensor: Some(expert_tensor),
            hierarchical_context: vec![level, context / level],
            optimizer_instances: both[numbers.2 % both.len()],
            order: names.join("-"),
            ..LayoutSpec::default()
        };
        (stage * pipeline, spec)
    }
}

proptest! {
    #[test]
    fn every_kind_divides_the_world_as_its_lengths_say((ranks, spec) in shapes()) {
        // Pipelines that are not the same for both are refused, and nothing else of these.
        let made = Layout::new(ranks, spec.clone());
        if let Err(e) = &made {
            prop_assert!(e.to_string().contains("neighbours in a pipeline"), "{}", e);
            prop_assert!(!spec.order.ends_with("pp"));
        }
        prop_assume!(made.is_ok());
        let layout = made.unwrap();
        prop_assert_eq!(layout.size(), ranks);
        let (dense, experts) = (layout.dense_sizes(), layout.expert_sizes());
        let (tp, cp, pp, dp) = (dense.tensor, dense.context, dense.pipeline, dense.data);
        let (etp, ep, edp) = (experts.tensor, experts.expert, experts.data);
        prop_assert_eq!(tp * cp * dp * pp, ranks);
        prop_assert_eq!(etp * ep * edp * pp, ranks);
        let instances = spec.optimizer_instances;
        for kind in layout.kinds() {
            let length = match kind {
                GroupKind::Tensor => tp,
                GroupKind::Context => cp,
                GroupKind::Pipeline => pp,
                GroupKind::Data => dp,
                GroupKind::DataContext => dp * cp,
                GroupKind::TensorContext => tp * cp,
                GroupKind::TensorData => tp * dp,
                GroupKind::TensorDataContext => tp * dp * cp,
                GroupKind::Model => tp * pp,
                GroupKind::Embedding => pp.min(2),
                GroupKind::PositionEmbedding => 1,
                GroupKind::Expert => ep,
                GroupKind::ExpertTensor => etp,
                GroupKind::ExpertTensorModel => etp * ep,
                GroupKind::ExpertTensorModelPipeline => etp * ep * pp,
                GroupKind::ExpertData => edp,
                GroupKind::DataContextWithin => dp * cp / instances,
                GroupKind::ExpertDataWithin => edp / instances,
                GroupKind::ExpertDataAcross => instances,
                GroupKind::OptimizerInstance => ranks / instances,
                GroupKind::HierarchicalContext(n) => spec.hierarchical_context[n as usize],
            };
            let groups = layout.groups(kind).unwrap();
            for group in &groups {
                prop_assert_eq!(group.len() as u32, length, "{}", kind);
                prop_assert!(group.windows(2).all(|pair| pair[0] < pair[1]), "{}: {:?}", kind, group);
            }
            let mut all = groups.concat();
            all.sort_unstable();
            match kind {
                GroupKind::Embedding | GroupKind::PositionEmbedding => {
                    let pipelines = (ranks / pp) as usize;
                    prop_assert_eq!(groups.len(), pipelines);
                    all.dedup();
                    prop_assert_eq!(all.len(), pipelines * length as usize);
                }
                _ => prop_assert_eq!(all, (0..ranks).collect::<Vec<_>>(), "{}", kind),
            }
        }
    }

    #[test]
    fn groups_of_different_dimensions_meet_in_one_rank_and_joint_ones_hold_their_parts((ranks, spec) in shapes()) {
        use GroupKind::*;
        let made = Layout::new(ranks, spec);
        prop_assume!(made.is_ok());
        let layout = made.unwrap();
        let of = |rank, kind| layout.group_of(rank, kind).unwrap().unwrap();
        for rank in 0..ranks {
            for dimensions in [
                &[Tensor, Context, Data, Pipeline][..],
                &[ExpertTensor, Expert, ExpertData, Pipeline],
                &[Expert, ExpertTensor, ExpertDataWithin, ExpertDataAcross],
                &[HierarchicalContext(0), HierarchicalContext(1), Tensor, Data],
                &[OptimizerInstance, ExpertDataAcross],
            ] {
                for (n, one) in dimensions.iter().enumerate() {
                    for other in &dimensions[n + 1..] {
                        let (one, other) = (of(rank, *one), of(rank, *other));
                        let common: Vec<u32> = one.into_iter().filter(|r| other.contains(r)).collect();
                        prop_assert_eq!(common, [rank]);
                    }
                }
            }
            for (whole, parts) in [
                (DataContext, &[Data, Context, DataContextWithin][..]),
                (TensorContext, &[Tensor, Context]),
                (TensorDataContext, &[TensorData, TensorContext, DataContext, ExpertTensorModel, ExpertData]),
                (Model, &[Tensor, Pipeline]),
                (ExpertTensorModel, &[ExpertTensor, Expert]),
                (ExpertTensorModelPipeline, &[ExpertTensorModel, Pipeline]),
                (ExpertData, &[ExpertDataWithin, ExpertDataAcross]),
                (Context, &[HierarchicalContext(0), HierarchicalContext(1)]),
                (OptimizerInstance, &[ExpertDataWithin, ExpertTensorModelPipeline]),
            ] {
                let whole = of(rank, whole);
                for part in parts {
                    prop_assert!(of(rank, *part).iter().all(|r| whole.contains(r)), "{}", part);
                }
            }
            let (before, after) = layout.pipeline_neighbours(rank).unwrap();
            let pipeline = of(rank, Pipeline);
            let at = pipeline.iter().position(|r| *r == rank).unwrap();
            prop_assert_eq!(after, pipeline[(at + 1) % pipeline.len()]);
            prop_assert_eq!(before, pipeline[(at + pipeline.len() - 1) % pipeline.len()]);
            prop_assert_eq!(layout.stages_of(rank), [at as u32]);
        }
    }
}
