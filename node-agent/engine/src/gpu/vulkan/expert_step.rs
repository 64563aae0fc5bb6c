//! The part of a layer's step that is made of experts.

use std::ops::Range;

use prima_model::{Experts as ExpertsSpec, Gating};
use prima_vulkan::{
    self as vulkan, ExpertProduct, ExpertRows, ExpertTiles, Input, Mixture, Pass, Routing,
    SharedExpert, VulkanError, input_bytes,
};

use super::placed::{Experts, Matrices, PlacedLayer};
use super::step::{Step, StepError};
use super::workspace::Layout;

/// Where what experts need lies in the workspace.
pub(super) struct ExpertPlaces {
    logits: Range<u64>,
    /// The parts of [`ExpertRows`].
    routed: [Range<u64>; 4],
    /// Rows of the pass, rounded to bytes for experts where they are not for others.
    bytes: Range<u64>,
    /// Rows of choices.
    gate: Range<u64>,
    up: Range<u64>,
    gated_bytes: Range<u64>,
    made: Range<u64>,
    shared_bytes: Range<u64>,
    shared_logits: Range<u64>,
}

impl ExpertPlaces {
    /// For so many rows in any of the layers; without experts, no places.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for more experts than there are kernels for.
    pub fn new<'a>(
        layout: &mut Layout,
        rows: usize,
        layers: impl Iterator<Item = &'a PlacedLayer>,
    ) -> Result<ExpertPlaces, VulkanError> {
        let mut most = [0; 12];
        for layer in layers {
            if let (Some(experts), Some(spec)) = (&layer.experts, spec(layer)) {
                let own = bytes(rows, layer, experts, spec)?;
                for (most, own) in most.iter_mut().zip(own) {
                    *most = own.max(*most);
                }
            }
        }
        let [
            logits,
            choices,
            gathered,
            places,
            tiles,
            bytes,
            gate,
            up,
            gated_bytes,
            made,
            shared_bytes,
            shared_logits,
        ] = most.map(|bytes| layout.bytes(bytes));
        Ok(ExpertPlaces {
            logits,
            routed: [choices, gathered, places, tiles],
            bytes,
            gate,
            up,
            gated_bytes,
            made,
            shared_bytes,
            shared_logits,
        })
    }
}

/// Of each of the places.
fn bytes(
    rows: usize,
    layer: &PlacedLayer,
    experts: &Experts,
    spec: &ExpertsSpec,
) -> Result<[u64; 12], VulkanError> {
    let tiles = tiles(rows, experts, spec)?;
    let numbers = |count: usize| 4 * count as u64;
    let [choices, gathered, places, of_tiles] = tiles.bytes();
    let inner = numbers(tiles.choices() * spec.width);
    let hidden = experts.router.cols;
    let shared_width = layer.dense.as_ref().map_or(0, |mlp| mlp.gate.rows);
    Ok([
        numbers(rows * spec.count),
        choices,
        gathered,
        places,
        of_tiles,
        tiles.input_bytes(hidden),
        inner,
        inner,
        tiles.gated_bytes(spec.width),
        numbers(tiles.choices() * hidden),
        input_bytes(rows, shared_width),
        numbers(rows),
    ])
}

fn tiles(rows: usize, experts: &Experts, spec: &ExpertsSpec) -> Result<ExpertTiles, VulkanError> {
    let formats = [&experts.gate, &experts.up, &experts.down].map(|each| each.format);
    ExpertTiles::new(rows, spec.used, spec.count, formats)
}

fn spec(layer: &PlacedLayer) -> Option<&ExpertsSpec> {
    layer.spec.feed_forward.experts.as_ref()
}

/// Numbers that experts have for a row in the widest of their parts.
pub(super) fn widest_row(layer: &PlacedLayer) -> usize {
    spec(layer).map_or(0, |spec| {
        let hidden = layer.output.rows;
        spec.used * spec.width.max(hidden)
    })
}

impl<'a> Step<'a> {
    /// x += post-norm(experts(input) + dense(input)), the second where there is one.
    pub(super) fn experts(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        input: Input<'a>,
        (experts, spec): (&'a Experts, &'a ExpertsSpec),
    ) -> Result<(), StepError> {
        let (layer, places) = (self.layer, &self.places.experts);
        let slice = |place: &Range<u64>| self.slice(place);
        let [choices, rows, of_choices, of_tiles] = places.routed.each_ref().map(slice);
        let routed = ExpertRows {
            sizes: tiles(self.rows, experts, spec)?,
            choices,
            rows,
            places: of_choices,
            tiles: of_tiles,
        };
        let logits = slice(&places.logits);
        self.project(pass, matrices, &experts.router, input, logits, None)?;
        let shared_logits = slice(&places.shared_logits);
        if let Some(mlp) = &layer.dense {
            self.gate_and_up(pass, matrices, mlp, input)?;
            if let Some(gate) = &mlp.output_gate {
                self.project(pass, matrices, gate, input, shared_logits, None)?;
            }
        }
        pass.barrier();

        let bias = experts.selection_bias.as_ref();
        let routing = Routing {
            logits,
            selection_bias: bias.map(|bias| layer.vector(bias)),
            gating: match spec.gating {
                Gating::Softmax => vulkan::Gating::Softmax,
                Gating::Sigmoid => vulkan::Gating::Sigmoid,
                Gating::SoftmaxOfChosen => vulkan::Gating::SoftmaxOfChosen,
            },
            groups: spec.groups.map(|groups| (groups.count, groups.used)),
            normalized: spec.normalized,
            scale: spec.scale,
        };
        pass.route(routed, routing)?;
        let formats = [experts.gate.format, experts.up.format];
        let rounded = pass.expert_input(routed, input, formats, slice(&places.bytes))?;
        let shared = match &layer.dense {
            Some(mlp) => Some((mlp, self.gated(pass, mlp, slice(&places.shared_bytes))?)),
            None => None,
        };
        pass.barrier();
        pass.group_by_expert(routed)?;
        let projected = slice(&self.places.projected);
        if let Some((mlp, gated)) = shared {
            self.project(pass, matrices, &mlp.down, gated, projected, None)?;
        }
        pass.barrier();

        let [of_gate, of_up, of_down] = matrices.experts(pass, experts)?;
        let bias = |projection| layer.bias(projection);
        let (gate, up) = (slice(&places.gate), slice(&places.up));
        for (matrix, bias, out) in [
            (of_gate, bias(&experts.gate), gate),
            (of_up, bias(&experts.up), up),
        ] {
            let product = ExpertProduct {
                x: rounded,
                is_grouped: false,
                out,
                bias,
            };
            pass.multiply_experts(routed, matrix, product)?;
        }
        pass.barrier();
        let room = (experts.down.format, slice(&places.gated_bytes));
        let gated = pass.gate_experts(routed, layer.activation, (gate, up), spec.width, room)?;
        pass.barrier();
        let made = slice(&places.made);
        let product = ExpertProduct {
            x: gated,
            is_grouped: true,
            out: made,
            bias: bias(&experts.down),
        };
        pass.multiply_experts(routed, of_down, product)?;
        pass.barrier();

        let post_norm = layer.feed_forward_post_norm.as_ref();
        let x = slice(&self.places.x);
        // What was multiplied is not needed any more.
        let mixed = slice(&self.places.normed);
        let (out, add) = match post_norm {
            None => (x, Some(self.residual_scale)),
            Some(_) => (mixed, None),
        };
        let mixture = Mixture {
            made,
            width: experts.router.cols,
            shared: layer.dense.as_ref().map(|mlp| SharedExpert {
                made: projected,
                logits: mlp.output_gate.as_ref().map(|_| shared_logits),
            }),
            out,
            add,
        };
        pass.mix_experts(routed, mixture)?;
        pass.barrier();
        if let Some(weight) = post_norm {
            let scale = Some(self.residual_scale);
            pass.norm(self.norm(weight, self.pass_rows(mixed), x, scale))?;
            pass.barrier();
        }
        Ok(())
    }
}
