"""The losses of tasks, one number a row or token: plain functions of tensors.

`policy` and `reference` are log-probabilities of the same tokens under the model that learns and
under the frozen base.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize


def dpo(
    policy: torch.Tensor, reference: torch.Tensor, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """Direct preference optimization, `(pairs, 2)` to `(pairs,)`; chosen comes first.

        -(1 - e) log s(h) - e log s(-h),   h = beta (log-ratio of chosen - log-ratio of rejected)

    with the sigmoid s and e = `label_smoothing`, the share of labels taken to be swapped
    (conservative DPO). Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.
    """
    ratios = policy - reference
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    right = -logsigmoid(margin) * (1 - label_smoothing)
    return right - logsigmoid(-margin) * label_smoothing


def kto(
    ratios: torch.Tensor,
    desirable: torch.Tensor,
    baseline: torch.Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """Kahneman-Tversky optimization, `(rows,)` to `(rows,)`.

        w (1 - s(beta (ratio - z))) where desirable, w' (1 - s(beta (z - ratio))) where not

    `ratios` are policy minus reference, `baseline` z is the estimate of how far the policy is from
    the reference, at least 0 and without gradient; `weights` are (w, w').
    Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.
    """
    gain = beta * (ratios - baseline)
    wanted = weights[0] * (1 - torch.sigmoid(gain))
    unwanted = weights[1] * (1 - torch.sigmoid(-gain))
    return torch.where(desirable, wanted, unwanted)


def sdpg(
    policy: torch.Tensor, teacher: torch.Tensor, base: torch.Tensor, *, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Self-distilled policy gradient: loss, advantage and divergence, each of the shape given.

        -A log p + beta (exp(d) - d - 1),   A = log p_teacher - log p (no gradient),
                                            d = log p_base - log p

    Teacher and base are the same frozen weights; the teacher has read its own prompt, with what the
    policy is to learn to do without. The first term is the single-step policy gradient of the
    reverse KL divergence from the teacher (MiniLLM, Gu et al. 2024,
    https://arxiv.org/abs/2306.08543), the second is Schulman's estimate of the divergence from the
    base, as in GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300). That these two together
    are `sdpg`, on given completions and without importance weights, is Milepost's own definition.
    """
    advantage = (teacher - policy).detach()
    apart = base - policy
    divergence = torch.exp(apart) - apart - 1
    return beta * divergence - advantage * policy, advantage, divergence.detach()


def bradley_terry(scores: torch.Tensor) -> torch.Tensor:
    """`-log s(chosen - rejected)`, `(pairs, 2)` to `(pairs,)`; chosen comes first."""
    return -logsigmoid(scores[:, 0] - scores[:, 1])


def ranking(
    anchors: torch.Tensor, candidates: torch.Tensor, own: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Multiple-negatives ranking, `(rows, hidden)` to `(rows,)`.

    The cross entropy of finding candidate `own[i]` for anchor i among all candidates, by cosine
    similarity times `scale`. Henderson et al. 2017, https://arxiv.org/abs/1705.00652.
    """
    similarity = normalize(anchors, dim=-1) @ normalize(candidates, dim=-1).T
    return cross_entropy(similarity * scale, own, reduction="none")


def verifier(
    logits: torch.Tensor,
    values: torch.Tensor,
    targets: torch.Tensor,
    value: torch.Tensor,
    judged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a language model with a value head is trained for: two parts, `(rows, columns)` each.

    The negative log-likelihood of the next tokens, and the squared error of the values of those
    columns that are `judged`; 0 elsewhere. `logits` `(rows, columns, vocabulary)`, `value`
    `(rows, 1)`: what each row is worth. Token-level verifiers with a joint objective, Cobbe et al.
    2021, https://arxiv.org/abs/2110.14168.
    """
    flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return flat.view_as(targets), (values - value).square() * judged
