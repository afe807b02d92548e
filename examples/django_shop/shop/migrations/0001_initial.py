from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("customer", models.TextField()),
                ("cents", models.IntegerField()),
            ],
        ),
        migrations.CreateModel(
            "Bill",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("order_id", models.BigIntegerField()),
                ("customer", models.TextField()),
                ("cents", models.IntegerField()),
            ],
        ),
    )
