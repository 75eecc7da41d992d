"""The ten cases of ai-benchmark, in PyTorch: ResNet-V2-50 and -152, VGG-16, DeepLab, LSTM.

Prints a line per case, then a table. `--seconds` is the time of each measurement.
"""

import argparse
import json
import time

import torch
from torch import nn


class Bottleneck(nn.Module):
    """A block of ResNet-V2: normalisation and activation come first."""

    def __init__(self, inputs, width, stride, dilation=1):
        super().__init__()
        outputs = 4 * width
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.rest = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x):
        active = self.first(x)
        return self.rest(active) + (self.shortcut(active) if self.shortcut else x)


def resnet_stages(blocks, strides=(1, 2, 2, 2), dilations=(1, 1, 1, 1)):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            layers.append(Bottleneck(inputs, width, strides[stage] if block == 0 else 1, dilations[stage]))
            inputs = 4 * width
    return layers + [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]


def resnet_v2(blocks):
    return nn.Sequential(*resnet_stages(blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def vgg16():
    layers, inputs = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000),
    )


class DeepLab(nn.Module):
    """DeepLab v3: a dilated ResNet-V2-50 and pyramid pooling."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*resnet_stages((3, 4, 6, 3), (1, 2, 2, 1), (1, 1, 1, 2)))
        self.branches = nn.ModuleList(
            [nn.Conv2d(2048, 256, 1)]
            + [nn.Conv2d(2048, 256, 3, padding=rate, dilation=rate) for rate in (6, 12, 18)]
        )
        self.head = nn.Conv2d(4 * 256, 21, 1)

    def forward(self, x):
        features = self.backbone(x)
        pooled = torch.cat([branch(features) for branch in self.branches], 1)
        return nn.functional.interpolate(self.head(pooled), size=x.shape[2:], mode="bilinear")


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(300, 1024, batch_first=True)
        self.head = nn.Linear(1024, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


# Number, name, model, shapes of a sample and batches: of inference and of training.
CASES = [
    ("1", "ResNet-V2-50", lambda: resnet_v2((3, 4, 6, 3)), (3, 346, 346), (3, 346, 346), 50, 20),
    ("2", "ResNet-V2-152", lambda: resnet_v2((3, 8, 36, 3)), (3, 256, 256), (3, 256, 256), 10, 10),
    ("3", "VGG-16", vgg16, (3, 224, 224), (3, 224, 224), 20, 2),
    ("4", "DeepLab", DeepLab, (3, 512, 512), (3, 384, 384), 2, 1),
    ("5", "LSTM", Lstm, (1024, 300), (1024, 300), 100, 10),
]


def infer(model, x):
    with torch.inference_mode():
        return model(x)


def train(model, optimizer, x):
    optimizer.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
    optimizer.step()


def measure(step, batch, seconds, least):
    """Returns samples per second, after two steps of warming up."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    begin, steps = time.monotonic(), 0
    while steps < least or time.monotonic() - begin < seconds:
        step()
        steps += 1
        if steps % 4 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return steps * batch / (time.monotonic() - begin)


def run(case, arguments):
    number, name, make, inference_shape, training_shape, inference_batch, training_batch = case
    scale = lambda batch: max(batch // arguments.divide, 1)
    model = make().cuda().eval()
    x = torch.randn(scale(inference_batch), *inference_shape, device="cuda")
    yield f"{number}.1", name, "inference", measure(
        lambda: infer(model, x), len(x), arguments.seconds, arguments.least
    )
    del x
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(scale(training_batch), *training_shape, device="cuda")
    yield f"{number}.2", name, "training", measure(
        lambda: train(model, optimizer, x), len(x), arguments.seconds, arguments.least
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="time of each measurement")
    parser.add_argument("--least", type=int, default=5, help="least number of steps of each measurement")
    parser.add_argument("--divide", type=int, default=1, help="divide batches by this, for a small share")
    parser.add_argument("--label", default="", help="the kind of share, for the comparison")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_properties(0)
    print(json.dumps({"label": arguments.label, "gpu": device.name, "memory": torch.cuda.mem_get_info()[1]}), flush=True)
    rows = []
    for case in CASES:
        try:
            for number, name, kind, rate in run(case, arguments):
                rows.append((number, name, kind, f"{rate:.1f}"))
                print(json.dumps({"case": number, "name": name, "kind": kind, "rate": round(rate, 2)}), flush=True)
        except torch.OutOfMemoryError:
            number = f"{case[0]}.{2 if rows and rows[-1][0] == case[0] + '.1' else 1}"
            rows.append((number, case[1], "", "out of memory"))
            print(json.dumps({"case": number, "name": case[1], "error": "out of memory"}), flush=True)
        torch.cuda.empty_cache()
    print()
    print("| case | model | | samples/s |")
    print("|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
