//! A layout in terms that frameworks share: degrees by role, the movement of attention, token order, and the training step.

use ithaca_differentiate::{GradientType, PipelineOrder, Training};
use ithaca_import::{Facts, Mode, Pages, Workload};
use ithaca_ir::{DType, Diagnostic};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::placement;
use ithaca_layout::shard::{HeadSplit, OrderChoice, SequenceFit, ShardOptions, Zero};

/// The tensors that ranks along an axis split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Weights: tensor parallelism.
    Tensor,
    /// Weights, and caches by their tokens: decode context parallelism.
    DecodeContext,
    /// The sequence outside attention, heads inside.
    Heads,
    /// The sequence outside attention and inside.
    Tokens,
    /// Caches by their tokens; weights are whole.
    Cache,
    /// Sequences of the batch.
    Data,
    /// Experts only; ranks compute the same attention.
    Experts,
    /// Layers: pipeline parallelism.
    Stages,
}

/// An axis of the mesh with more than one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The name.
    pub name: String,
    /// Ranks along it.
    pub size: u64,
    /// Its role.
    pub role: Role,
    /// Whether it splits experts too.
    pub splits_experts: bool,
}

/// The positions of a rank's tokens where the sequence is split inside attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenOrder {
    /// In a row.
    Contiguous,
    /// Chunks from both ends.
    Zigzag,
    /// Blocks of so many tokens, dealt round.
    Striped(u64),
    /// Another order, as the text form writes it.
    Other(String),
}

/// A choice that no framework has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnsupportedOption {
    /// Ranks have different numbers of heads.
    UnevenHeads,
    /// Heads are padded.
    PaddedHeads,
    /// Ranks have different numbers of tokens.
    UnevenSequence,
    /// Layers have strategies of their own.
    LayerStrategies,
    /// The movement has options, or cross-attention another movement.
    Movement(String),
    /// A sequence has axes of its own.
    SequenceAxes,
    /// Partial results travel in bf16.
    NarrowPartials,
    /// Documents are packed into sequences.
    Documents,
    /// Experts drop tokens beyond a capacity.
    Capacity,
    /// Some weights stay whole at ZeRO 3.
    PersistentWeights,
}

/// A layout of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The mode.
    pub mode: Mode,
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence.
    pub sequence: u64,
    /// Tokens that the cache of a sequence has room for.
    pub cache: Option<u64>,
    /// Pages of the cache.
    pub pages: Option<Pages>,
    /// Element type of caches, where it is not that of activations.
    pub cache_type: Option<DType>,
    /// Element type of weights and activations.
    pub dtype: DType,
    /// The axes with more than one rank, major to minor.
    pub axes: Vec<Axis>,
    /// Whether the ranks that split weights split the residual stream by sequence.
    pub sequence_parallel: bool,
    /// The movement of attention, if the sequence is split inside it.
    pub movement: Option<String>,
    /// The token order, if the sequence is split inside attention.
    pub order: TokenOrder,
    /// The ZeRO stage.
    pub zero: Zero,
    /// The training step.
    pub training: Training,
    /// Layers of each chunk of a pipeline, in order; empty where they are not known.
    pub chunk_layers: Vec<u64>,
    /// Choices that no framework has.
    pub unsupported: Vec<UnsupportedOption>,
}

impl Layout {
    /// The layout of `options` for a workload whose training step has the stages of the mesh; `order` is the order of tokens inside
    /// attention, or that of the options.
    ///
    /// # Errors
    /// `P10`, `P11` for a strategy that does not exist or a mesh that it does not take.
    pub fn new(
        registry: &Registry,
        options: &ShardOptions,
        workload: &Workload,
        facts: &Facts,
        order: Option<TokenOrder>,
    ) -> Result<Self, Diagnostic> {
        let ShardOptions { strategy, mesh, heads, sequence, zero, layers, attention, partials, .. } = options;
        let strategies = registry.product(strategy)?;
        let own = attention.sequences.iter().flat_map(|(_, axes)| axes);
        let own: Vec<_> = own.filter_map(|axis| mesh.axis(axis)).collect();
        let place = placement(&strategies, mesh, &own)?;
        let mut axes = Vec::new();
        for (id, axis) in mesh.axes.iter().filter(|(_, axis)| axis.size > 1) {
            let role = if place.stages.contains(&id) {
                Role::Stages
            } else if place.weights.contains(&id) {
                if place.cache.contains(&id) { Role::DecodeContext } else { Role::Tensor }
            } else if place.cache.contains(&id) {
                Role::Cache
            } else if place.heads.contains(&id) {
                Role::Heads
            } else if place.sequence.contains(&id) || own.contains(&id) {
                Role::Tokens
            } else if place.batch.contains(&id) {
                Role::Data
            } else {
                Role::Experts
            };
            let splits_experts = place.experts.contains(&id);
            axes.push(Axis { name: axis.name.clone(), size: axis.size, role, splits_experts });
        }
        let is_split = |axis: &Axis| matches!(axis.role, Role::Tensor | Role::DecodeContext);
        let sequence_parallel = mesh
            .axes
            .iter()
            .any(|(id, axis)| axis.size > 1 && place.weights.contains(&id) && place.residual.contains(&id));
        let moves =
            axes.iter().any(|axis| matches!(axis.role, Role::Tokens | Role::Cache | Role::DecodeContext));
        let chosen = attention.movement.as_ref();
        let movement = chosen.map(|m| m.name.clone()).or(place.movement).filter(|_| moves);
        let asked = match options.order {
            Some(OrderChoice::Zigzag) => TokenOrder::Zigzag,
            Some(OrderChoice::Striped(block)) => TokenOrder::Striped(block),
            Some(OrderChoice::Balanced) => TokenOrder::Other("balanced".to_owned()),
            Some(OrderChoice::Contiguous) | None => TokenOrder::Contiguous,
        };
        let degree: u64 =
            axes.iter().filter(|a| is_split(a) || a.role == Role::Heads).map(|a| a.size).product();
        let divides = facts.heads.is_multiple_of(degree)
            && (facts.kv_heads.is_multiple_of(degree) || degree.is_multiple_of(facts.kv_heads.max(1)));
        let tokens: u64 = axes
            .iter()
            .filter(|a| {
                matches!(a.role, Role::Heads | Role::Tokens) || (a.role == Role::Tensor && sequence_parallel)
            })
            .map(|a| a.size)
            .product();
        let mut unsupported = Vec::new();
        let mut note =
            |is_given: bool, option: UnsupportedOption| unsupported.extend(is_given.then_some(option));
        note(*heads == HeadSplit::Uneven && !divides, UnsupportedOption::UnevenHeads);
        note(*heads == HeadSplit::Pad && !divides, UnsupportedOption::PaddedHeads);
        note(
            *sequence == SequenceFit::Uneven && !workload.sequence.is_multiple_of(tokens),
            UnsupportedOption::UnevenSequence,
        );
        note(!layers.is_empty(), UnsupportedOption::LayerStrategies);
        if let Some(other) = chosen.filter(|m| !m.options.is_empty()).or(attention.cross_movement.as_ref()) {
            note(true, UnsupportedOption::Movement(other.to_string()));
        }
        note(!attention.sequences.is_empty(), UnsupportedOption::SequenceAxes);
        note(*partials != Default::default(), UnsupportedOption::NarrowPartials);
        note(workload.documents.is_some(), UnsupportedOption::Documents);
        note(workload.capacity.is_some(), UnsupportedOption::Capacity);
        note(*zero != zero.without_persistent(), UnsupportedOption::PersistentWeights);
        let dtype = workload.dtype.unwrap_or(facts.dtype);
        Ok(Self {
            mode: workload.mode,
            batch: workload.batch,
            sequence: workload.sequence,
            cache: workload.cache,
            pages: workload.pages,
            cache_type: workload.cache_type.filter(|&cache| cache != dtype),
            dtype,
            axes,
            sequence_parallel,
            movement,
            order: order.unwrap_or(asked),
            zero: zero.without_persistent(),
            training: workload.training.clone(),
            chunk_layers: Vec::new(),
            unsupported,
        })
    }

    /// The type in which gradients are summed, where it is not that of all of the step.
    pub fn gradients(&self) -> Option<DType> {
        let wide = GradientType::Full.of(self.dtype);
        (self.mode == Mode::Train && wide != self.dtype).then(|| self.training.gradients.of(self.dtype))
    }

    /// The layout with these layers in the chunks of its pipeline.
    #[must_use]
    pub fn cut(self, chunk_layers: Vec<u64>) -> Self {
        Self { chunk_layers, ..self }
    }

    /// Ranks.
    pub fn ranks(&self) -> u64 {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Ranks along all axes of a role.
    pub fn degree(&self, role: Role) -> u64 {
        self.axes.iter().filter(|axis| axis.role == role).map(|axis| axis.size).product()
    }

    /// Ranks that split weights.
    pub fn tensor(&self) -> u64 {
        self.degree(Role::Tensor) * self.degree(Role::DecodeContext)
    }

    /// Ranks that split the tokens of a sequence.
    pub fn context(&self) -> u64 {
        self.degree(Role::Heads) * self.degree(Role::Tokens)
    }

    /// Ranks that split the batch.
    pub fn data(&self) -> u64 {
        self.degree(Role::Data)
    }

    /// Stages of the pipeline.
    pub fn stages(&self) -> u64 {
        self.degree(Role::Stages)
    }

    /// Whether experts are split over ranks of this role.
    pub(crate) fn splits_experts_over(&self, role: Role) -> bool {
        self.axes.iter().any(|axis| axis.splits_experts && axis.role == role)
    }

    /// Ranks that split experts.
    pub fn experts(&self) -> u64 {
        self.axes.iter().filter(|axis| axis.splits_experts).map(|axis| axis.size).product()
    }

    /// Ranks that split the width of an expert.
    pub fn expert_tensor(&self) -> u64 {
        let split =
            |axis: &&Axis| matches!(axis.role, Role::Tensor | Role::DecodeContext) && !axis.splits_experts;
        self.axes.iter().filter(split).map(|axis| axis.size).product()
    }

    /// Axes that split tokens inside attention.
    pub fn token_axes(&self) -> usize {
        self.axes.iter().filter(|axis| axis.role == Role::Tokens).count()
    }

    /// Micro-batches of a step.
    pub fn micro_batches(&self) -> u64 {
        if self.mode == Mode::Train { self.training.micro_batches } else { 1 }
    }

    /// Sequences of a micro-batch on a data-parallel rank.
    pub fn micro_batch(&self) -> u64 {
        (self.batch / (self.data() * self.micro_batches()).max(1)).max(1)
    }

    /// Chunks of layers of a stage.
    pub fn chunks(&self) -> u64 {
        let is_interleaved = self.stages() > 1 && self.training.pipeline == PipelineOrder::Interleaved;
        if is_interleaved { self.training.chunks } else { 1 }
    }

    /// Whether all chunks of the pipeline have as many layers; also where they are not known.
    pub fn is_even(&self) -> bool {
        self.chunk_layers.windows(2).all(|pair| pair[0] == pair[1])
    }
}
